"""The current strategy, and whether code runs as one of its replicas: the contexts of `tf.distribute`."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import keras

from phalanx.collectives.communicator import ReduceOp
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.keras_compat.global_batch import step_collectives
from phalanx.keras_compat.global_batch.step_collectives import SINGLE_RANK, StepCollectives, StepScope
from phalanx.keras_compat.global_batch.step_means import share_of_step
from phalanx.keras_compat.keras_internals import in_symbolic_scope
from phalanx.strategies.reduce_ops import as_float, map_non_none_leaves, to_reduce_op

if TYPE_CHECKING:
    from phalanx.strategies.strategy import Strategy


class _Entered(NamedTuple):
    """A strategy whose scope, `run`, or method of a model this thread is inside.

    Attributes:
        owns_new_objects: Whether objects created now belong to the strategy. Objects that callbacks create in `fit` do
            not: some callbacks run only on the chief.
    """

    strategy: Strategy
    owns_new_objects: bool = True


class _Stack(threading.local):
    """The scopes, `run` calls and methods that this thread is inside, innermost last."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []
        self.replicas: list[ReplicaContext] = []
        self.local_read_depth = 0
        self.merge_call_depth = 0


_stack = _Stack()


class ReplicaContext:
    """The interface for code inside `strategy.run` (`tf.distribute.ReplicaContext`)."""

    def __init__(self, strategy: Strategy):
        self._strategy = strategy

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are merged."""
        return 1 if self._strategy.placement is not None else self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """Rank of this replica, 0 to `num_replicas_in_sync` - 1."""
        return self._strategy.rank

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that this replica computes on."""
        return self._strategy.local_devices

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Merge `value`, a tensor or a structure of tensors, over the replicas."""
        return self._strategy.reduce(reduce_op, value, axis=None)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate the replicas' values along `axis`, in rank order."""
        return self._strategy.gather(value, axis)

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` outside the replica context."""
        with _cross_replica_context():
            return merge_fn(self._strategy, *args, **(kwargs or {}))


class StepContext(ReplicaContext):
    """The interface for code in the steps of `fit` and `evaluate`, as in `tf.distribute`.

    `fit` merges gradients as the mean over the global batch, including those that flow back through these collectives:
    a layer that computes with sums over all replicas gets the numbers of one process with the whole batch.

    Args:
        collectives: The collectives of the step.
    """

    def __init__(self, strategy: Strategy, collectives: StepCollectives) -> None:
        super().__init__(strategy)
        self._collectives = collectives

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that take the step; 1 between steps, for example in callbacks."""
        return 1 if self._is_single_rank else super().num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """Rank of this replica among those that take the step."""
        return 0 if self._is_single_rank else super().replica_id_in_sync_group

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Merge a value over the replicas; gradients flow back through the result.

        Args:
            reduce_op: "SUM" or "MEAN". A mean weights each replica by its share of the global batch, so the mean of
                the replicas' means is the mean over the global batch.
            value: A tensor, or a structure of tensors, with equal shapes on all replicas.

        Raises: UnsupportedError for other operations, and in `predict`.
        """
        op = to_reduce_op(reduce_op)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN) and not self._is_single_rank:
            raise UnsupportedError(
                f"all_reduce({op.name!r}) in a step of fit(): replicas exchange sums and means there. Train in a "
                f"custom loop with strategy.run, or keep the value in a metric."
            )
        share = share_of_step() if op is ReduceOp.MEAN and not self._is_single_rank else None

        def reduce(tensors: list[Any]) -> list[Any]:
            own = [keras.ops.convert_to_tensor(tensor) for tensor in tensors]
            if share is not None:
                own = [tensor * keras.ops.cast(share, tensor.dtype) for tensor in own]
            return self._collectives.all_reduce(own)

        return map_non_none_leaves(reduce, keras.tree.map_structure(as_float, value) if op is ReduceOp.MEAN else value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate the replicas' values along `axis`, in rank order; gradients flow back through the result.

        Args:
            value: A tensor, or a structure of tensors, with one row for each sample along `axis`.
            axis: The sample axis.

        Raises: UnsupportedError in `predict`, and with parameter servers.
        """

        def gather(tensors: list[Any]) -> list[Any]:
            first = [keras.ops.moveaxis(tensor, axis, 0) for tensor in tensors]
            return [keras.ops.moveaxis(tensor, 0, axis) for tensor in self._collectives.all_gather(first)]

        return map_non_none_leaves(gather, value)

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `ReplicaContext.merge_call`.

        Raises: ConfigurationError in a step, which can run only collectives across replicas.
        """
        if not self._is_single_rank:
            raise ConfigurationError(
                "merge_call() was called in a step of fit() or evaluate(). Call get_replica_context().all_reduce "
                "there, or train in a custom loop with strategy.run."
            )
        return super().merge_call(merge_fn, args, kwargs)

    @property
    def _is_single_rank(self) -> bool:
        return self._collectives is SINGLE_RANK


class _Collectives:
    """See `StepCollectives`."""

    weights_gradients = False
    may_lack_samples = True

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self.synchronizes_batch_norm = context.strategy._policy.synchronized_batch_norm

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        sums: list[Any] = self._context.all_reduce("SUM", tensors)
        return sums

    def all_gather(self, tensors: list[Any]) -> list[Any]:
        rows: list[Any] = self._context.all_gather(tensors, axis=0)
        return rows


@contextmanager
def scope_context(strategy: Strategy) -> Iterator[Strategy]:
    """Context of `strategy.scope()`."""
    _stack.entered.append(_Entered(strategy))
    try:
        yield strategy
    finally:
        _stack.entered.pop()


@contextmanager
def method_context(strategy: Strategy) -> Iterator[None]:
    """Context of `fit` and other methods of this strategy's models."""
    _stack.entered.append(_Entered(strategy, owns_new_objects=False))
    try:
        yield
    finally:
        _stack.entered.pop()


@contextmanager
def run_context(strategy: Strategy) -> Iterator[ReplicaContext]:
    """Context of `strategy.run`."""
    context = ReplicaContext(strategy)
    _stack.replicas.append(context)
    # `run` needs no surrounding scope: objects created inside belong to the strategy.
    _stack.entered.append(_Entered(strategy))
    try:
        with nullcontext() if strategy.computes_alone else StepScope(_Collectives(context)):
            yield context
    finally:
        _stack.entered.pop()
        _stack.replicas.pop()


@contextmanager
def _cross_replica_context() -> Iterator[None]:
    # Scopes stay entered: a merge call runs in the cross-replica context of the strategy.
    replicas, _stack.replicas = _stack.replicas, []
    _stack.merge_call_depth += 1
    try:
        with StepScope(None):
            yield
    finally:
        _stack.merge_call_depth -= 1
        _stack.replicas = replicas


@contextmanager
def local_reads() -> Iterator[None]:
    """Context in which variables that are merged on read have this replica's values, even outside `run`."""
    _stack.local_read_depth += 1
    try:
        yield
    finally:
        _stack.local_read_depth -= 1


def reads_are_merged() -> bool:
    """Whether reading a variable that is merged on read yields the job's value here."""
    return not _stack.replicas and not _stack.local_read_depth


def has_strategy() -> bool:
    """Whether the caller is inside the scope of a strategy other than the default one, or in `fit` of its model."""
    strategy = current_strategy()
    return strategy is not None and not strategy._is_default


def current_strategy() -> Strategy | None:
    """The innermost strategy whose scope, `run`, or method of a model the caller is in; None if there is none."""
    return _stack.entered[-1].strategy if _stack.entered else None


def owning_strategy() -> Strategy | None:
    """The strategy that owns objects created here; None if there is none."""
    return next((each.strategy for each in reversed(_stack.entered) if each.owns_new_objects), None)


def current_run_context() -> ReplicaContext | None:
    """The context of the innermost `strategy.run` that the caller is in; None if there is none."""
    return _stack.replicas[-1] if _stack.replicas else None


def current_replica_context() -> ReplicaContext | None:
    """The context of `strategy.run`, or else of the `fit` or other method of a model that the caller is in; else None.

    Where Keras computes shapes, such as for a functional model that is created in a scope, a process computes alone.
    """
    if _stack.replicas or not _stack.entered or (_stack.entered[-1].owns_new_objects and not in_symbolic_scope()):
        return current_run_context()
    strategy = _stack.entered[-1].strategy
    # Between steps, in callbacks and where layers are built, each process computes alone.
    return StepContext(strategy, (strategy.shares_batches and step_collectives.current()) or SINGLE_RANK)


def trace_key() -> Hashable | None:
    """Key of the strategies whose scope and `run` the caller is in, on which a trace depends; None if there is none."""
    # Not their ids: a trace outlives its strategy, and a later strategy may get the same address.
    strategy, run = owning_strategy(), current_run_context()
    return None if strategy is None else (strategy._trace_key, run.strategy._trace_key if run else None)


def in_cross_replica_context() -> bool:
    """Whether the caller is inside a scope but not inside `strategy.run` or `fit`, or inside `merge_call`."""
    return current_replica_context() is None and (has_strategy() or _stack.merge_call_depth > 0)
