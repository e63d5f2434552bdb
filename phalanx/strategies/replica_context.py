"""Which strategy is current, and whether this code runs as a replica of it: `tf.distribute`'s contexts."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from phalanx.collectives.communicator import ReduceOp
from phalanx.keras_compat.step_collectives import InStep

if TYPE_CHECKING:
    from phalanx.strategies.strategy import Strategy


class _Stack(threading.local):
    """The scopes and `run` calls that this thread is inside of, innermost last."""

    def __init__(self) -> None:
        self.strategies: list[Strategy] = []
        self.replicas: list[ReplicaContext] = []
        self.reads_own = 0  # depth of `reading_own`
        self.merges = 0  # depth of `merge_call`


_stack = _Stack()


class ReplicaContext:
    """What code inside `strategy.run` may use (`tf.distribute.ReplicaContext`)."""

    def __init__(self, strategy: Strategy):
        self._strategy = strategy

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are merged."""
        return 1 if self._strategy.placement is not None else self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's rank, 0 to `num_replicas_in_sync` - 1."""
        return self._strategy.rank

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that this replica computes on."""
        return self._strategy.local_devices

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """The value, merged over the replicas; `value` may be a structure of tensors."""
        return self._strategy.reduce(reduce_op, value, axis=None)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """The replicas' values, concatenated along `axis` in rank order."""
        return self._strategy.gather(value, axis)

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` outside of the replica context."""
        with _outside():
            return merge_fn(self._strategy, *args, **(kwargs or {}))


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
def entered(strategy: Strategy) -> Iterator[Strategy]:
    """Inside `strategy.scope()`."""
    _stack.strategies.append(strategy)
    try:
        yield strategy
    finally:
        _stack.strategies.pop()


@contextmanager
def running(strategy: Strategy) -> Iterator[ReplicaContext]:
    """Inside `strategy.run`."""
    context = ReplicaContext(strategy)
    _stack.replicas.append(context)
    _stack.strategies.append(strategy)  # `run` needs no scope around it, and what is made inside is the strategy's
    try:
        with nullcontext() if strategy.computes_alone else InStep(_Collectives(context)):
            yield context
    finally:
        _stack.strategies.pop()
        _stack.replicas.pop()


@contextmanager
def _outside() -> Iterator[None]:
    # Scopes stay: a merge call is in the cross-replica context of the strategy.
    replicas, _stack.replicas = _stack.replicas, []
    _stack.merges += 1
    try:
        with InStep(None):
            yield
    finally:
        _stack.merges -= 1
        _stack.replicas = replicas


@contextmanager
def reading_own() -> Iterator[None]:
    """Where variables that are merged on read have this replica's values, outside of `run` too."""
    _stack.reads_own += 1
    try:
        yield
    finally:
        _stack.reads_own -= 1


def reads_jobs_values() -> bool:
    """Whether variables that are merged on read have the job's values here."""
    return not _stack.replicas and not _stack.reads_own


def has_strategy() -> bool:
    """Whether this code is inside the scope of a strategy other than the default one."""
    strategy = current_strategy()
    return strategy is not None and not strategy._is_default


def current_strategy() -> Strategy | None:
    """The innermost strategy whose scope or `run` this code is in; None outside of all."""
    return _stack.strategies[-1] if _stack.strategies else None


def current_replica_context() -> ReplicaContext | None:
    """The context of the innermost `strategy.run` that this code is in; None outside of all."""
    return _stack.replicas[-1] if _stack.replicas else None


def trace_key() -> Hashable | None:
    """What a trace depends on: the strategies whose scope and whose `run` this code is in; None outside of all."""
    # Not their identities: a trace outlives its strategy, and the next one may get the address of that.
    scopes, replicas = _stack.strategies, _stack.replicas
    return (scopes[-1]._trace_key, replicas[-1].strategy._trace_key if replicas else None) if scopes else None


def in_cross_replica_context() -> bool:
    """Whether this code is inside a scope and not inside `strategy.run`, or inside `merge_call`."""
    return not _stack.replicas and (has_strategy() or _stack.merges > 0)
