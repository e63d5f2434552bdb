"""`Strategy`: the interface of `tf.distribute.Strategy`, over replicas that are processes.

Every replica runs the same program, so what `tf.distribute` calls a per-replica value is here simply this replica's
value: `run` calls the function once, for this replica, and `experimental_local_results` returns a tuple of one.
Methods that merge values (`reduce`, `gather`) must be called by every replica, in the same order.
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
from phalanx.engines import make_tensors, making_placed, put_on_mesh, running_placed
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
    own_parts,
    reduce_along,
    reduced,
    spread_along,
    with_open_axis,
    without_axes,
)
from phalanx.strategies.reduce_ops import as_float, on_present_leaves, reduce_op_of
from phalanx.strategies.replica_variables import StrategyParts
from phalanx.strategies.strategy_extended import StrategyExtended
from phalanx.training import model_dispatch
from phalanx.training.replica import Replica, divides_batches
from phalanx.training.steps.gradient_merge import CustomLoopMerge
from phalanx.training.steps.optimizer_properties import loss_scale
from phalanx.training.training_policy import EVERY_STEP, TrainingPolicy


class ValueContext:
    """The context that a value function receives (`tf.distribute.experimental.ValueContext`)."""

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1):
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            f"ValueContext(replica_id_in_sync_group={self.replica_id_in_sync_group}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync})"
        )


class Strategy:
    """How a model is trained on several replicas. Create one of its subclasses.

    `fit` trains a model that was created or compiled inside `scope()` on all replicas together, also after you leave
    the scope.
    """

    _is_default = False
    """Whether it is what `get_strategy` returns outside of every scope."""

    def __init__(
        self, replica: Replica, cluster_resolver: ClusterResolver | None = None, policy: TrainingPolicy = EVERY_STEP
    ):
        self._replica = replica
        self._policy = policy
        self._merge = CustomLoopMerge(replica, policy.compression)  # of custom loops; `fit` has others
        self._cluster_resolver = cluster_resolver
        self._parts = StrategyParts(self)
        self._trace_key: Hashable = object()  # see `replica_context.trace_key`
        self._tensors = make_tensors()
        # A `tf.function` decides while it is traced whether optimizers merge: inside `run` it needs a trace of its own.
        self._tensors.trace_apart(replica_context.trace_key)
        self._tensors.count_replicas(replica_context)
        process_exit.add_cause_finder(self._tensors.failure_behind)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise ConfigurationError(
            f"A {type(self).__name__} belongs to the process that created it, and cannot be pickled. A function for "
            f"phalanx.launch or another process must create its own strategy."
        )

    def __copy__(self) -> Strategy:
        return self

    def __deepcopy__(self, memo: Any) -> Strategy:
        return self  # of an object that holds it: this process has one place in the job

    @property
    def _member(self) -> model_dispatch.Member:
        """What models made in the scope belong to."""
        return self._replica

    # Who we are.

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are merged. In an elastic job it is always the number with which the
        job began, so that what a program computes from it is the same on all members.

        Where one program spans many devices, the number of parts into which the mesh divides each global batch. For
        what runs inside this program, losses for example, there is one replica (`get_replica_context`)."""
        if (simulated := number_of_simulated_ranks()) is not None:
            return simulated
        return self._replica.initial_world_size if self.placement is None else self.placement.data_shards

    @property
    def placement(self) -> Placement | None:
        """How one compiled program divides models over a mesh of devices; None where each replica has a program of its
        own."""
        return self._policy.placement

    @property
    def computes_alone(self) -> bool:
        """Whether nothing is to be merged with other replicas: there are none, or one program computes everything."""
        return self._replica.is_alone or self.placement is not None

    @property
    def shares_batches(self) -> bool:
        """Whether steps of `fit` are computed in parts: on several replicas, now or later, or in micro-batches."""
        return self.num_replicas_in_sync > 1 or divides_batches(self._replica)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that described the cluster; None if there is none."""
        return self._cluster_resolver

    @property
    def rank(self) -> int:
        """This replica's number, 0 to `num_replicas_in_sync` - 1; 0 is the chief. A process that waits to join is
        never 0."""
        replica = self._replica
        return max(1, replica.initial_world_size - 1) if replica.is_candidate else replica.rank

    @property
    def is_chief(self) -> bool:
        """Whether this replica is the one that saves, logs and prints."""
        return self._replica.is_chief

    @property
    def local_devices(self) -> tuple[str, ...]:
        """The devices that this process computes on."""
        if self.placement is not None:
            return tuple(map(str, self.placement.mesh.devices.flatten()))
        return (f"/job:worker/task:{self.rank}/device:{keras.backend.backend().upper()}:0",)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent so far to merge values, through shared memory too."""
        return self._replica.communicator.statistics.bytes_sent

    def communication_summary(self) -> str:
        """The communication of this replica so far, as one line of text."""
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
        """What optimizers, metrics and loops of a program's own may need (`tf.distribute.StrategyExtended`)."""
        return StrategyExtended(self)

    def __repr__(self) -> str:
        if self.placement is not None:
            return f"<{type(self).__name__}: {self.placement}>"
        return f"<{type(self).__name__}: replica {self.rank} of {self.num_replicas_in_sync}>"

    # Where models are made.

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Models created or compiled inside belong to this strategy."""
        install_hook()
        with replica_context.entered(self), making_placed(self.placement), self._merging_variables():
            yield self

    def _merging_variables(self) -> AbstractContextManager[None]:
        """Where variables of the backend itself that are created are the job's."""
        return self._tensors.merging_variables(_current_parts)

    # Custom loops.

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Call `fn` on every replica with this replica's arguments; returns this replica's result.

        Where one program spans many devices, `fn` is called once, with global arrays: jit it, or call `run` in a jitted
        function. Then it is one program over all devices, and its sums are those of the global batch.

        Keras optimizers applied inside (`apply`, `apply_gradients`) merge their gradients first: the sum over replicas,
        as in `tf.distribute`, so the loss must be scaled by the global batch (see `compute_average_loss`). On JAX,
        `stateless_apply` merges nothing, because it is made for compiled functions: merge the gradients with
        `get_replica_context().all_reduce`, between two jitted functions.
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
        install_hook()
        if not self.computes_alone:
            self._parts.prepare()
        with replica_context.running(self), running_placed(self.placement), self._merging_variables():
            try:
                result = fn(*args, **(kwargs or {}))
            except Exception as error:
                behind = self._tensors.failure_behind(error)  # no `:=`, which AutoGraph cannot convert
                if behind is not None:
                    raise behind from None
                raise
        return result

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """The replicas' values merged into one, on every replica.

        Sums and means can be differentiated on TensorFlow and PyTorch: the gradient on each replica is the sum (mean)
        of the gradients on all. So if one replica differentiates, every replica must.

        Args:
            reduce_op: "SUM" or "MEAN" (also "MIN", "MAX", "PRODUCT"), or a `ReduceOp`, also `tf.distribute`'s.
            value: A tensor, or a structure of tensors (or None) of equal shapes on all replicas. The mean of integers
                and booleans is of `keras.config.floatx()`.
            axis: None: merge elementwise. Else each replica's value is first merged along this axis, or these; a mean
                then counts every element once, however many each replica has.
        """
        op = reduce_op_of(reduce_op)
        axes = None if axis is None else tuple(axis) if isinstance(axis, list | tuple) else (axis,)
        if self.placement is not None:
            return value if axes is None else keras.tree.map_structure(lambda leaf: reduced(leaf, op, axes), value)
        if op is ReduceOp.MEAN:
            # A variable that is merged on read would be merged before it is merged here.
            with replica_context.reading_own():
                value = keras.tree.map_structure(as_float, value)
        if axes is None:

            def merge(arrays: list[Array]) -> list[Array]:
                progress.enter("all_reduce")
                return self._replica.communicator.all_reduce(arrays, op)

            # The adjoint of a sum over replicas is that sum; of a mean, the mean.
            def gradient(flowing: list[Array], shapes: list[tuple[int, ...]]) -> list[Array]:
                del shapes
                return merge(flowing)

            shape_of = same_shape
        else:

            def merge(arrays: list[Array]) -> list[Array]:
                progress.enter("all_reduce")
                return reduce_along(self._replica, op, arrays, axes)

            def gradient(flowing: list[Array], shapes: list[tuple[int, ...]]) -> list[Array]:
                return spread_along(self._replica, op, flowing, shapes, axes)

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
        """A structure with its leaves merged."""
        call = partial(self._tensors.call, merge, shape_of=shape_of, gradient=gradient)
        with replica_context.reading_own():
            return on_present_leaves(call, value)

    def gather(self, value: Any, axis: int) -> Any:
        """The replicas' values, concatenated along `axis` in rank order, on every replica. Other axes must agree.

        It can be differentiated on TensorFlow and PyTorch: the gradient of a replica's values is the sum of the
        gradients on all. So if one replica differentiates, every replica must.
        """

        if self.placement is not None:
            return value

        def merge(arrays: list[Array]) -> list[Array]:
            progress.enter("all_gather")
            return [gather_along(self._replica, array, axis) for array in arrays]

        def gradient(flowing: list[Array], shapes: list[tuple[int, ...]]) -> list[Array]:
            return own_parts(self._replica, flowing, shapes, axis)

        def shape_of(shape: Shape) -> Shape:
            return with_open_axis(shape, axis)

        return self._merged(value, merge, shape_of, gradient)

    def broadcast_from_chief(self, value: Any) -> Any:
        """The chief's value, on every replica: numbers, strings, booleans, None, lists and dictionaries of them.

        All replicas must call it.
        """
        return self._replica.broadcast_from_chief(value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of the replicas of this process: this one's."""
        return (value,)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """`value_fn(ValueContext)` for this replica."""
        return value_fn(ValueContext(self.rank, self.num_replicas_in_sync))

    # Data.

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> data.DistributedDataset:
        """This replica's part of a dataset whose batches are global batches. Takes all datasets that `fit` takes."""
        return data.distribute_dataset(dataset, self._distribution())

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[data.InputContext], Any], options: Any = None
    ) -> data.DistributedDataset:
        """This replica's own dataset, of local batches, created by `dataset_fn(InputContext)`."""
        return data.distribute_from_function(dataset_fn, self._distribution())

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[data.InputContext], Any], options: Any = None
    ) -> data.DistributedDataset:
        """The former name of `distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    if not TYPE_CHECKING:  # for which there is no other attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_member("Strategy", self, name)

    def explain_sharding(self, dataset: Any, *, batch_size: int | None = None) -> str:
        """What each replica will read of an input of `fit`, and why. Does not communicate."""
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
        # A process that waits to join has no part yet; what it makes meanwhile gets one when it is iterated.
        return self.rank, max(self._replica.world_size, self.rank + 1)

    def _distribution(self) -> DatasetDistribution:
        # Drawn on all replicas, so that the program's random numbers stay the same, and the chief's is used.
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


def install_hook() -> None:
    """Have Keras ask for the current strategy; safe to call again."""
    trainer_hook.install(model_dispatch.ModelDispatcher(_current_owner, _merge_gradients, _note_variable))


def _current_owner() -> model_dispatch.ModelOwner | None:
    strategy = replica_context.owning_strategy()
    if strategy is None:
        return None
    return model_dispatch.ModelOwner(
        strategy._member, strategy._policy, partial(replica_context.running_method, strategy)
    )


def _current_parts() -> StrategyParts | None:
    strategy = replica_context.owning_strategy()
    return None if strategy is None else strategy._parts


def _note_variable(variable: Any) -> None:
    if (parts := _current_parts()) is not None:
        parts.note(variable)


def _merge_gradients(gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Merge gradients, as an optimizer does first inside `strategy.run`."""
    context = replica_context.current_run()
    if context is None or context.strategy.computes_alone:
        return gradients
    strategy = context.strategy
    if not strategy._tensors.merges_in_apply:
        if strategy._tensors.are_of_own_samples(gradients, [variable.value for variable in variables]):
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
