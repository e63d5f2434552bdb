"""Bounded staleness: how far a worker may be ahead of the slowest in asynchronous training. Pure.

Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.parameter_server.server_protocol import Worker


class BoundedStaleness:
    """Counts the workers' steps. The schedule's lock protects it.

    Args:
        bound: Number of steps that a worker may be ahead of the slowest.
        workers: The connected workers.
    """

    def __init__(self, bound: int, workers: Iterable[Worker]):
        self._bound = bound
        # Number of applied steps, by worker. Only differences matter: a worker that returns starts at the minimum.
        self._steps = dict.fromkeys(workers, 0)

    def add_worker(self, worker: Worker) -> None:
        """Add a worker. One that joins late is not behind: the others must not wait for it to catch up."""
        self._steps[worker] = min(self._steps.values(), default=0)

    def remove_worker(self, worker: Worker) -> None:
        self._steps.pop(worker, None)

    def count_step(self, worker: Worker) -> None:
        """Count an applied step of a worker."""
        if worker in self._steps:
            self._steps[worker] += 1

    def blocked_by(self, worker: Worker, outstanding: int) -> Worker | None:
        """The slowest worker, if this one, with this many outstanding tickets, may not get further ahead of it."""
        if worker not in self._steps:
            return None
        slowest = min(self._steps, key=lambda other: self._steps[other])
        ahead = self._steps[worker] + outstanding - self._steps[slowest]
        return slowest if ahead > self._bound else None
