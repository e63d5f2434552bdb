"""Metrics of custom training loops: each replica counts its samples, and what is read outside of `run` is the job's."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras

from phalanx.keras_compat.merged_variables import merge_on_read
from phalanx.strategies import replica_context

if TYPE_CHECKING:
    from phalanx.strategies.strategy import Strategy


class MetricParts:
    """The metrics that were created in a strategy's scope; see `ReplicaParts`."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._metrics: weakref.WeakSet[Any] = weakref.WeakSet()

    def note(self, metric: Any) -> None:
        self._metrics.add(metric)

    def prepare(self) -> None:
        """Before `run`: what it updates is read as the job's from then on."""
        for metric in self._metrics:
            merge_on_read(metric, self)

    def find_new(self) -> None:
        """After `run`: so is what it has created, as some metrics create their variables late."""
        for metric in self._metrics:
            merge_on_read(metric, self, updated=True)

    def is_in_run(self) -> bool:
        return replica_context.current_replica_context() is not None

    def merges_now(self) -> bool:
        # `fit` and the like merge metrics themselves.
        return replica_context.reads_jobs_values() and self._strategy._replica.calling_thread is None

    def reading_own(self) -> AbstractContextManager[None]:
        return replica_context.reading_own()

    def merge(self, value: Any, aggregation: str) -> Any:
        if aggregation == "only_first_replica":
            return self._strategy.reduce("SUM", self.own_part(value, aggregation))
        return self._strategy.reduce(aggregation.upper(), value)

    def own_part(self, value: Any, aggregation: str) -> Any:
        if aggregation == "mean" or self._strategy.rank == 0:
            return value
        return keras.ops.zeros_like(value)
