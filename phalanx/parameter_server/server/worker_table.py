"""The workers of a server: their links, which are expected to reconnect, and how the others have ended. Pure."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.cluster.admission_control import incarnation_from_link_name
from phalanx.cluster.membership import CONNECTION_CLOSED, SEE_TASK_OUTPUT
from phalanx.errors import PeerLostError
from phalanx.parameter_server.server_protocol import CHIEF_WORKER, Worker, peer_lost
from phalanx.transport.link import Link


class WorkerTable:
    """Table of a server's workers. Protected by the lock of its `WorkerMembership`.

    Args:
        names: The workers' names, by number.
        reconnect_s: Seconds for which a worker whose connection broke is expected to reconnect.
        chief_reconnect_s: The same time for the chief.
        clock: Returns the current time in seconds.

    Attributes:
        links: Name (`link_name`) and link of each worker that has one, including evicted processes.
        connected: Workers that count: they have a link and are not evicted.
        seen: Workers that have ever been connected.
        left: Workers that have left the job (`LeaveJob`).
        chief_failure: Error that the chief ended with; empty without one.
    """

    def __init__(
        self, names: tuple[str, ...], *, reconnect_s: float, chief_reconnect_s: float, clock: Callable[[], float]
    ):
        self._names = names
        self._reconnect_s = reconnect_s
        self._chief_reconnect_s = chief_reconnect_s
        self._clock = clock
        self.links: dict[Worker, tuple[str, Link | None]] = {}
        self.connected: set[Worker] = set()
        self.seen: set[Worker] = set()
        self.left: set[Worker] = set()
        self.chief_failure = ""
        self._lost_since: dict[Worker, float] = {}  # workers that have not left the job
        self._expected_until: dict[Worker, float] = {}  # workers without a link that may reconnect
        self._endings: dict[Worker, str] = {}  # how the connections of lost workers ended, as sentences
        self._evicted: set[str] = set()  # incarnations: a process stays evicted on all its later links

    def connect(self, worker: Worker, name: str, link: Link | None) -> tuple[str, Link | None] | None:
        """Record a worker's new link. Returns the name and link that it replaces."""
        former = self.links.get(worker)
        for ended in (self._expected_until, self._endings, self._lost_since):
            ended.pop(worker, None)
        self.left.discard(worker)
        self.links[worker] = name, link
        if not self.is_evicted(name):  # an evicted process may not know it yet: its requests are refused
            self.connected.add(worker)
        self.seen.add(worker)
        return former

    def leave(self, worker: Worker, failure: str) -> None:
        """Record that a worker has left the job, with the error that it ended with, or none."""
        self.left.add(worker)
        if worker == CHIEF_WORKER:
            self.chief_failure = failure

    def remove(self, worker: Worker, name: str) -> bool:
        """Remove a link that has ended. Returns whether it was the worker's current one."""
        if self.links.get(worker, ("", None))[0] != name:
            return False  # replaced before its end was noticed: the worker is not lost
        del self.links[worker]
        if worker not in self.left:
            self._lost_since[worker] = self._clock()
        return True

    def forget_departures(self) -> None:
        """Forget workers that left, were lost or evicted here: this server did not lead; the other one had them."""
        self.left.clear()
        self._lost_since.clear()
        self._evicted.clear()

    def expect_return(self, worker: Worker, why: str) -> None:
        """Expect a worker whose connection was lost to reconnect; `why` is a sentence, or empty."""
        self._endings[worker] = why
        self._expected_until[worker] = self._clock() + (
            self._chief_reconnect_s if worker == CHIEF_WORKER else self._reconnect_s
        )

    def expect_all(self, within_s: float) -> None:
        """Expect all workers that are not connected to connect within this time; none counts as lost."""
        absent = set(range(len(self._names))) - self.connected
        self._expected_until = dict.fromkeys(absent, self._clock() + within_s)
        self._lost_since.clear()

    def evict(self, worker: Worker) -> None:
        """Stop waiting for a worker; what its process still sends is refused."""
        if self.is_present(worker):
            self._endings[worker] = "it made no progress for too long, and training continued without it."
        if worker in self.connected:
            self._evicted.add(self.incarnation(worker))
        self._expected_until.pop(worker, None)

    def evicted_tasks(self) -> tuple[str, ...]:
        """The tasks whose process is evicted and has not left."""
        return tuple(self._names[worker] for worker, (name, _) in self.links.items() if self.is_evicted(name))

    def is_evicted(self, name: str) -> bool:
        """Whether the process with the link of this name is evicted."""
        return incarnation_from_link_name(name) in self._evicted

    def is_present(self, worker: Worker) -> bool:
        """Whether a worker is connected, or expected to reconnect soon."""
        return worker in self.connected or self._clock() < self._expected_until.get(worker, 0.0)

    def has_link(self, worker: Worker, name: str) -> bool:
        """Whether this is the link of a worker that counts."""
        return worker in self.connected and self.links[worker][0] == name

    def incarnation(self, worker: Worker) -> str:
        """The incarnation of a worker's process; "" if it is not connected."""
        return incarnation_from_link_name(self.links[worker][0]) if worker in self.connected else ""

    def never_connected(self) -> str:
        """The names of the workers that have never connected, separated by commas."""
        return ", ".join(name for worker, name in enumerate(self._names) if worker not in self.seen)

    def contacts(self) -> set[Worker]:
        """The workers that are or were connected to this server as the leader."""
        return {*self.links, *self.left, *self._lost_since}

    def lost_s(self, worker: Worker) -> float:
        """Seconds since a worker was lost; 0 if it is not."""
        now = self._clock()
        return now - self._lost_since.get(worker, now)

    def lost_error(self, worker: Worker, during: str) -> PeerLostError:
        """The error that names a worker that is no longer connected."""
        ending = self._endings.get(worker)
        return peer_lost(self._names[worker], during, f"{ending} {SEE_TASK_OUTPUT}" if ending else CONNECTION_CLOSED)
