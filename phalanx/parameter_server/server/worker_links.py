"""The links of the workers to one shard group, and how workers that had one have ended. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from phalanx.cluster.admission import link_name
from phalanx.parameter_server.server_protocol import CHIEF, Worker
from phalanx.transport.link import Link


class WorkerLinks:
    """The group's lock protects it.

    Attributes:
        by_worker: name and link of each connected worker.
        chief_failure: the error that the chief ended with; empty without one.
    """

    def __init__(self) -> None:
        self.by_worker: dict[Worker, tuple[str, Link]] = {}
        self.chief_failure = ""
        self._count = itertools.count()
        self._left: set[Worker] = set()  # with a goodbye
        self._lost_since: dict[Worker, float] = {}  # without one, by the monotonic clock

    def add(self, worker: Worker, incarnation: str, link: Link) -> tuple[str, tuple[str, Link] | None]:
        """A worker's new link; returns its name, and the name and link that it replaces."""
        name, former = link_name(incarnation, next(self._count)), self.by_worker.get(worker)
        self.by_worker[worker] = (name, link)
        self._left.discard(worker)
        self._lost_since.pop(worker, None)
        return name, former

    def leave(self, worker: Worker, failure: str) -> None:
        """A worker says goodbye, with the error that it ended with, or none."""
        self._left.add(worker)
        if worker == CHIEF:
            self.chief_failure = failure

    def remove(self, worker: Worker, link: Link, now: float) -> bool | None:
        """A link has ended; returns whether its worker said goodbye, None if it has another link by now."""
        if self.by_worker.get(worker, ("", None))[1] is not link:
            return None
        del self.by_worker[worker]
        if worker not in self._left:
            self._lost_since[worker] = now
        return worker in self._left

    def forget_absent(self) -> None:
        """This server did not lead: workers that left or were lost here were connected to the other one."""
        self._left.clear()
        self._lost_since.clear()

    def ever_connected(self) -> set[Worker]:
        """The workers that have been connected at some time."""
        return {*self.by_worker, *self._left, *self._lost_since}

    def has_left(self, worker: Worker) -> bool:
        """Whether a worker has said goodbye."""
        return worker in self._left

    def lost_for(self, worker: Worker, now: float) -> float:
        """Seconds since a worker was lost; 0 if it is not."""
        return now - self._lost_since.get(worker, now)

    def all_match(self, matches: Callable[[str], bool]) -> bool:
        """Whether the names of all links match."""
        return all(matches(name) for name, _ in self.by_worker.values())

    def links(self) -> Iterable[Link]:
        return [link for _, link in self.by_worker.values()]
