"""The workers that are connected to a server, those expected to reconnect, and how the others were lost. Pure."""

from __future__ import annotations

from collections.abc import Callable, Set

from phalanx.cluster.admission import incarnation_of
from phalanx.cluster.membership import CONNECTION_CLOSED, SEE_TASK_OUTPUT
from phalanx.errors import PeerLostError
from phalanx.parameter_server.server_protocol import CHIEF, Worker, peer_lost


class ConnectedWorkers:
    """Its owner's lock protects it.

    Args:
        names: the workers' names, by number.
        relink_s: seconds for which a worker whose connection broke is expected to reconnect.
        chief_relink_s: the same for the chief.
        clock: current time in seconds.

    Attributes:
        seen: workers that have been connected at some time.
    """

    def __init__(self, names: tuple[str, ...], *, relink_s: float, chief_relink_s: float, clock: Callable[[], float]):
        self._names = names
        self._relink_s = relink_s
        self._chief_relink_s = chief_relink_s
        self._clock = clock
        self._links: dict[Worker, str] = {}
        self._expected_until: dict[Worker, float] = {}  # workers without a link that may reconnect
        self._endings: dict[Worker, str] = {}  # how the connections of lost workers ended, as sentences
        self._evicted: set[str] = set()  # processes
        self.seen: set[Worker] = set()

    def connect(self, worker: Worker, link: str) -> None:
        """A worker is connected by the link of this name (`link_name`)."""
        self._expected_until.pop(worker, None)
        self._endings.pop(worker, None)
        self._links[worker] = link
        self.seen.add(worker)

    def disconnect(self, worker: Worker) -> None:
        """A worker's link has ended."""
        self._links.pop(worker, None)

    def expect_return(self, worker: Worker, why: str) -> None:
        """A worker has left without a goodbye and may reconnect; `why` is a sentence, or empty."""
        self._endings[worker] = why
        self._expected_until[worker] = self._clock() + (self._chief_relink_s if worker == CHIEF else self._relink_s)

    def expect_all(self, within_s: float) -> None:
        """All workers that are not connected are expected to connect within this time."""
        absent = set(range(len(self._names))) - self._links.keys()
        self._expected_until = dict.fromkeys(absent, self._clock() + within_s)

    def evict(self, worker: Worker) -> None:
        """Stop waiting for a worker; what its process still sends is refused."""
        if self.is_present(worker):
            self._endings[worker] = "it made no progress for too long, and training continued without it."
        if worker in self._links:
            self._evicted.add(incarnation_of(self._links[worker]))
        self._expected_until.pop(worker, None)

    def forget_evictions(self) -> None:
        """Accept the evicted processes again."""
        self._evicted.clear()

    def is_evicted(self, link: str) -> bool:
        """Whether the process of this link is evicted."""
        return incarnation_of(link) in self._evicted

    def is_present(self, worker: Worker) -> bool:
        """Whether a worker is connected, or expected to reconnect soon."""
        return worker in self._links or self._clock() < self._expected_until.get(worker, 0.0)

    @property
    def connected(self) -> Set[Worker]:
        """The workers that have a link now."""
        return self._links.keys()

    def has_link(self, worker: Worker, link: str) -> bool:
        """Whether this is the worker's current link."""
        return self._links.get(worker) == link

    def process(self, worker: Worker) -> str:
        """The incarnation of a worker's process; "" if it is not connected."""
        return incarnation_of(self._links.get(worker, ""))

    def never_connected(self) -> str:
        """The names of the workers that have never connected, separated by commas."""
        return ", ".join(name for worker, name in enumerate(self._names) if worker not in self.seen)

    def lost(self, worker: Worker, during: str) -> PeerLostError:
        """The error that names a worker that is no longer connected."""
        ending = self._endings.get(worker)
        return peer_lost(self._names[worker], during, f"{ending} {SEE_TASK_OUTPUT}" if ending else CONNECTION_CLOSED)
