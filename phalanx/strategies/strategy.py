"""`Strategy`: the interface of `tf.distribute.Strategy`, where each replica is a process.

Every replica runs the same program, so a per-replica value of `tf.distribute` is here the value of this replica:
`run` calls the function once, and `experimental_local_results` returns a tuple of one element. All replicas must call
the methods that merge values (`reduce`, `gather`), in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from rich.filesize import decimal

from phalanx import data
from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.compat.unsupported_names import missing_member
from phalanx.compression.compression_registry import describe
from phalanx.data.distributed_dataset import DatasetDistribution, Members
from phalanx.data.input_request import InputRequest
from phalanx.engines import make_tensors, placed_step_scope, placement_scope, put_on_mesh
from phalanx.engines.spmd.placement import Placement
from phalanx.engines.tensors import Gradient, HostFunction, Shape, same_shape
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.keras_compat import trainer_hook
from phalanx.keras_compat.global_batch.global_gradients import refuse_overwritten
from phalanx.keras_compat.global_batch.simulated_ranks import number_of_simulated_ranks
from phalanx.runtime import process_exit, progress
from phalanx.strategies import replica_context
from phalanx.strategies.axis_merges import (
    gather_along,
    gather_gradient,
    reduce_along,
    reduce_global,
    reduce_gradient,
    with_unknown_axis,
    without_axes,
)
from phalanx.strategies.reduce_ops import as_float, map_non_none_leaves, to_reduce_op
from phalanx.strategies.replica_variables import StrategyVariables
from phalanx.strategies.strategy_extended import StrategyExtended
from phalanx.training import model_dispatch
from phalanx.training.replica import Replica, divides_batches
from phalanx.training.steps.gradient_merge import CustomLoopMerge
from phalanx.training.steps.optimizer_properties import loss_scale
from phalanx.training.training_policy import EVERY_STEP, TrainingPolicy


class ValueContext:
    """Argument of a value function (`tf.distribute.experimental.ValueContext`)."""

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1):
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            f"ValueContext(replica_id_in_sync_group={self.replica_id_in_sync_group}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync})"
        )


class Strategy:
    """Base class of the strategies, which train a model on several replicas. Create one of its subclasses.

    `fit` trains a model that was created or compiled inside `scope()` on all replicas, even after you leave the scope.
    """

    _is_default = False
    """Whether this is the strategy that `get_strategy` returns outside any scope."""

    def __init__(
        self, replica: Replica, cluster_resolver: ClusterResolver | None = None, policy: TrainingPolicy = EVERY_STEP
    ):
        self._replica = replica
        self._policy = policy
        self._merge = CustomLoopMerge(replica, policy.compression)  # for custom loops; `fit` uses others
        self._cluster_resolver = cluster_resolver
        self._variables = StrategyVariables(self)
        self._trace_key: Hashable = object()  # see `replica_context.trace_key`
        self._tensors = make_tensors()
        # Tracing a `tf.function` fixes whether optimizers merge, so it needs a separate trace inside `run`.
        self._tensors.add_trace_key(replica_context.trace_key)
        self._tensors.count_replicas(replica_context)
        process_exit.add_cause_finder(self._tensors.find_cause)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise ConfigurationError(
            f"A {type(self).__name__} belongs to the process that created it, and cannot be pickled. A function for "
            f"phalanx.launch or another process must create its own strategy."
        )

    def __copy__(self) -> Strategy:
        return self

    def __deepcopy__(self, memo: Any) -> Strategy:
        return self  # when an object that holds it is copied: this process is one replica of the job

    @property
    def _member(self) -> model_dispatch.Member:
        """Owner of the models that are created in the scope."""
        return self._replica

    # Identity.

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are merged. In an elastic job, this is always the initial number of
        replicas, so that all members compute the same values from it.

        If one program spans many devices, this is the number of parts into which the mesh divides each global batch.
        Code inside this program, such as a loss, sees one replica (`get_replica_context`)."""
        if (simulated := number_of_simulated_ranks()) is not None:
            return simulated
        return self._replica.initial_world_size if self.placement is None else self.placement.data_shards

    @property
    def placement(self) -> Placement | None:
        """Division of models over a mesh of devices by one compiled program; None if each replica runs its own."""
        return self._policy.placement

    @property
    def computes_alone(self) -> bool:
        """Whether there is nothing to merge: there are no other replicas, or one program computes everything."""
        return self._replica.is_alone or self.placement is not None

    @property
    def shares_batches(self) -> bool:
        """Whether `fit` computes a step in parts: on several replicas, now or later, or in micro-batches."""
        return self.num_replicas_in_sync > 1 or divides_batches(self._replica)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that described the cluster; None if there is none."""
        return self._cluster_resolver

    @property
    def rank(self) -> int:
        """Rank of this replica, 0 to `num_replicas_in_sync` - 1; 0 is the chief. A process that waits to join is never
        0."""
        replica = self._replica
        return max(1, replica.initial_world_size - 1) if replica.is_candidate else replica.rank

    @property
    def is_chief(self) -> bool:
        """Whether this replica is the chief, which saves, logs and prints."""
        return self._replica.is_chief

    @property
    def local_devices(self) -> tuple[str, ...]:
        """The devices that this process computes on."""
        if self.placement is not None:
            return tuple(map(str, self.placement.mesh.devices.flatten()))
        return (f"/job:worker/task:{self.rank}/device:{keras.backend.backend().upper()}:0",)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent to merge values, including those through shared memory."""
        return self._replica.communicator.statistics.bytes_sent

    def communication_summary(self) -> str:
        """One-line summary of this replica's communication so far."""
        sent, network, _, collectives = self._replica.communicator.statistics
        way = "shared memory" if not network else "the network" if network == sent else "network and shared memory"
        period = self._policy.period
        rhythm = "" if period is None else f", weights exchanged every {period.steps} steps"
        return (
            f"replica {self.rank} of {self.num_replicas_in_sync}: {decimal(sent)} sent through {way} in "
            f"{collectives} collectives, compression: {describe(self._policy.compression)}{rhythm}"
        )

    @property
    def extended(self) -> StrategyExtended:
        """The interface for custom optimizers, metrics and training loops (`tf.distribute.StrategyExtended`)."""
        return StrategyExtended(self)

    def __repr__(self) -> str:
        if self.placement is not None:
            return f"<{type(self).__name__}: {self.placement}>"
        return f"<{type(self).__name__}: replica {self.rank} of {self.num_replicas_in_sync}>"

    # The scope.

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Context in which models that are created or compiled belong to this strategy."""
        install_trainer_hook()
        with replica_context.scope_context(self), placement_scope(self.placement), self._variable_merge_scope():
            yield self

    def _variable_merge_scope(self) -> AbstractContextManager[None]:
        """Context in which newly created variables of the backend belong to the job."""
        return self._tensors.variable_merge_scope(_current_variables)

    # Custom loops.

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Call `fn` on every replica with that replica's arguments, and return this replica's result.

        If one program spans many devices, `fn` is called once, with global arrays: jit it, or call `run` in a jitted
        function. It is then one program over all devices, and its sums run over the global batch.

        A Keras optimizer that is applied inside (`apply`, `apply_gradients`) first sums its gradients over the
        replicas, as in `tf.distribute`, so the loss must be scaled by the global batch size (see
        `compute_average_loss`). On JAX, `stateless_apply` merges nothing, because it is meant for compiled functions:
        merge the gradients with `get_replica_context().all_reduce`, between two jitted functions.
        """
        if not isinstance(args, list | tuple):
            raise ConfigurationError(
                f"strategy.run(fn, args=...) takes a tuple or a list of arguments; got a {type(args).__name__}. For a "
                f"single argument write args=(batch,), with the comma."
            )
        if self._replica.micro_batches:
            raise UnsupportedError(
                "CommunicationOptions(deterministic=True): strategy.run computes each replica's part of a batch at "
                "once, and the bits of that depend on the number of replicas. Train with fit or train_on_batch."
            )
        if self._replica.recording is not None:
            raise UnsupportedError(
                "`phalanx plan` measures the fit() of a program, and this one trains in a loop with strategy.run(). "
                "See docs/how-to/planning.md."
            )
        install_trainer_hook()
        if not self.computes_alone:
            self._variables.prepare()
        with replica_context.run_context(self), placed_step_scope(self.placement), self._variable_merge_scope():
            try:
                result = fn(*args, **(kwargs or {}))
            except Exception as error:
                cause = self._tensors.find_cause(error)  # no `:=`, which AutoGraph cannot convert
                if cause is not None:
                    raise cause from None
                raise
        return result

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """Merge the replicas' values, and return the result on every replica.

        Sums and means are differentiable on TensorFlow and PyTorch: the gradient on each replica is the sum (mean) of
        the gradients of all replicas. If one replica differentiates, every replica must.

        Args:
            reduce_op: "SUM" or "MEAN" (also "MIN", "MAX", "PRODUCT"), or a `ReduceOp` of Phalanx or `tf.distribute`.
            value: A tensor, or a structure of tensors (or None), with equal shapes on all replicas. The mean of
                integers and booleans has the dtype `keras.config.floatx()`.
            axis: An axis, or several, along which each replica's value is first reduced; a mean then counts every
                element once, even if the replicas have different numbers of elements. None: merge elementwise.
        """
        op = to_reduce_op(reduce_op)
        axes = None if axis is None else tuple(axis) if isinstance(axis, list | tuple) else (axis,)
        if self.placement is not None:
            return (
                value if axes is None else keras.tree.map_structure(lambda leaf: reduce_global(leaf, op, axes), value)
            )
        if op is ReduceOp.MEAN:
            # A variable that is merged on read would otherwise be merged twice.
            with replica_context.local_reads():
                value = keras.tree.map_structure(as_float, value)
        if axes is None:

            def merge(arrays: list[Array]) -> list[Array]:
                progress.enter("all_reduce")
                return self._replica.communicator.all_reduce(arrays, op)

            # The adjoint of a sum over replicas is the same sum; of a mean, the same mean.
            def gradient(gradients: list[Array], shapes: list[tuple[int, ...]]) -> list[Array]:
                del shapes
                return merge(gradients)

            shape_of = same_shape
        else:

            def merge(arrays: list[Array]) -> list[Array]:
                progress.enter("all_reduce")
                return reduce_along(self._replica, op, arrays, axes)

            def gradient(gradients: list[Array], shapes: list[tuple[int, ...]]) -> list[Array]:
                return reduce_gradient(self._replica, op, gradients, shapes, axes)

            def shape_of(shape: Shape) -> Shape:
                return without_axes(shape, axes)

        linear = op in (ReduceOp.SUM, ReduceOp.MEAN)
        return self._merged(value, merge, shape_of, gradient if linear else None)

    def _merged(
        self,
        value: Any,
        merge: HostFunction,
        shape_of: Callable[[Shape], Shape],
        gradient: Gradient | None,
    ) -> Any:
        """Merge the leaves of a structure."""
        call = partial(self._tensors.call, merge, shape_of=shape_of, gradient=gradient)
        with replica_context.local_reads():
            return map_non_none_leaves(call, value)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' values along `axis`, in rank order, on every replica. Other axes must agree.

        This is differentiable on TensorFlow and PyTorch: the gradient of a replica's values is the sum of the
        gradients of all replicas. If one replica differentiates, every replica must.
        """

        if self.placement is not None:
            return value

        def merge(arrays: list[Array]) -> list[Array]:
            progress.enter("all_gather")
            return [gather_along(self._replica, array, axis) for array in arrays]

        def gradient(gradients: list[Array], shapes: list[tuple[int, ...]]) -> list[Array]:
            return gather_gradient(self._replica, gradients, shapes, axis)

        def shape_of(shape: Shape) -> Shape:
            return with_unknown_axis(shape, axis)

        return self._merged(value, merge, shape_of, gradient)

    def broadcast_from_chief(self, value: Any) -> Any:
        """The chief's value, on every replica: numbers, strings, booleans, None, or lists and dictionaries of them.

        All replicas must call this.
        """
        return self._replica.broadcast_from_chief(value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of the replicas in this process: a tuple of one."""
        return (value,)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return `value_fn(ValueContext)` for this replica."""
        return value_fn(ValueContext(self.rank, self.num_replicas_in_sync))

    # Data.

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> data.DistributedDataset:
        """This replica's part of a dataset of global batches. Takes any dataset that `fit` takes."""
        return data.distribute_dataset(dataset, self._distribution())

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[data.InputContext], Any], options: Any = None
    ) -> data.DistributedDataset:
        """The dataset of local batches that `dataset_fn(InputContext)` creates for this replica."""
        return data.distribute_from_function(dataset_fn, self._distribution())

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[data.InputContext], Any], options: Any = None
    ) -> data.DistributedDataset:
        """Former name of `distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    if not TYPE_CHECKING:  # type checkers see no other attributes

        def __getattr__(self, name: str) -> Any:
            raise missing_member("Strategy", self, name)

    def explain_sharding(self, dataset: Any, *, batch_size: int | None = None) -> str:
        """Explain which part of an input of `fit` each replica will read, and why. Does not communicate."""
        steps = 1 if batch_size is None and not data.accepts_batch_size(dataset) else None
        rank, world_size = self._rank_and_size()
        request = InputRequest(
            dataset,
            batch_size=batch_size,
            steps_per_epoch=steps,
            rank=rank,
            world_size=world_size,
        )
        return data.shard_input(request).description.explain()

    def _rank_and_size(self) -> tuple[int, int]:
        # A process that waits to join has no part yet; a dataset that it creates meanwhile gets one when iterated.
        return self.rank, max(self._replica.world_size, self.rank + 1)

    def _distribution(self) -> DatasetDistribution:
        # All replicas draw, so that their random states stay equal; the chief's number is used.
        own = int(np.random.randint(2**31 - 1))
        seed = self._replica.run_recorded(lambda: self._replica.communicator.broadcast_bytes(own.to_bytes(8)))
        rank, world_size = self._rank_and_size()
        elastic = self._replica.elastic
        return DatasetDistribution(
            rank=rank,
            world_size=world_size,
            seed=int.from_bytes(seed),
            kind=self._tensors.distributed_dataset,
            convert=self._tensors.from_host if self.placement is None else partial(put_on_mesh, self.placement),
            any_rank=self._replica.any,
            members=None if elastic is None else Members(self._rank_and_size, self._replica.broadcast_from_chief),
        )


def install_trainer_hook() -> None:
    """Make Keras ask for the current strategy. Safe to call again."""
    trainer_hook.install(model_dispatch.ModelDispatcher(_current_owner, _merge_gradients, _register_variable))


def _current_owner() -> model_dispatch.ModelOwner | None:
    strategy = replica_context.owning_strategy()
    if strategy is None:
        return None
    return model_dispatch.ModelOwner(
        strategy._member, strategy._policy, partial(replica_context.method_context, strategy)
    )


def _current_variables() -> StrategyVariables | None:
    strategy = replica_context.owning_strategy()
    return None if strategy is None else strategy._variables


def _register_variable(variable: Any) -> None:
    if (variables := _current_variables()) is not None:
        variables.register(variable)


def _merge_gradients(gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Merge the gradients of an optimizer that is applied inside `strategy.run`."""
    context = replica_context.current_run_context()
    if context is None or context.strategy.computes_alone:
        return gradients
    strategy = context.strategy
    if not strategy._tensors.merges_in_apply:
        if strategy._tensors.are_unmerged(gradients, [variable.value for variable in variables]):
            raise UnsupportedError(
                "A compiled function in strategy.run computes gradients and applies them with stateless_apply, which "
                "merges nothing: each replica would train alone. Compile two functions, and merge between them: "
                "gradients = strategy.reduce('SUM', gradients). See docs/how-to/custom-training-loops.md."
            )
        return gradients
    if strategy._policy.period is not None:
        raise UnsupportedError(
            f"{type(strategy).__name__} exchanges weights in `fit` only, not where an optimizer is applied in "
            f"`strategy.run`. Train with `fit`, or use MultiWorkerMirroredStrategy(compression=...)."
        )
    refuse_overwritten(variables, "an optimizer in `strategy.run`")
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    merged = list(gradients)
    merge, scale = strategy._merge, loss_scale(trainer_hook.applied_optimizer())
    values = strategy._tensors.merge_gradients(
        merge.function_for(variables, scale), merge.gather, [gradients[i] for i in present]
    )
    for i, value in zip(present, values, strict=True):
        merged[i] = value
    return merged
