"""Who is here: the workers that are linked to a server, those that are on their way to it, and how the others left."""

from __future__ import annotations

from collections.abc import Callable, Set

from phalanx.cluster.admission import incarnation_of
from phalanx.cluster.membership import CONNECTION_CLOSED, SEE_TASK_OUTPUT
from phalanx.errors import PeerLostError

Worker = int
CHIEF: Worker = 0


class ConnectedWorkers:
    """Its owner's lock protects it.

    Args:
        names: of the workers, by number.
        relink_s: for how long a worker whose link has ended is expected to make it anew; `chief_relink_s`: the chief.

    Attributes:
        seen: those that were here at some time.
    """

    def __init__(self, names: tuple[str, ...], *, relink_s: float, chief_relink_s: float, clock: Callable[[], float]):
        self._names = names
        self._relink_s = relink_s
        self._chief_relink_s = chief_relink_s
        self._clock = clock
        self._links: dict[Worker, str] = {}
        self._awaited_until: dict[Worker, float] = {}  # those without a link that are on their way here, perhaps
        self._endings: dict[Worker, str] = {}  # of those that are not here any more: what is known of their end
        self._evicted: set[str] = set()  # processes
        self.seen: set[Worker] = set()

    def enter(self, worker: Worker, link: str) -> None:
        """A worker is here, by the link of this name (`link_name`)."""
        self._awaited_until.pop(worker, None)
        self._endings.pop(worker, None)
        self._links[worker] = link
        self.seen.add(worker)

    def leave(self, worker: Worker) -> None:
        """Its link has ended."""
        self._links.pop(worker, None)

    def miss(self, worker: Worker, why: str) -> None:
        """It has left without a goodbye, and may be back in a moment; `why` is a sentence, or empty."""
        self._endings[worker] = why
        self._awaited_until[worker] = self._clock() + (self._chief_relink_s if worker == CHIEF else self._relink_s)

    def expect_all(self, within_s: float) -> None:
        """All that are not linked are on their way here."""
        absent = set(range(len(self._names))) - self._links.keys()
        self._awaited_until = dict.fromkeys(absent, self._clock() + within_s)

    def evict(self, worker: Worker) -> None:
        """It is not waited for any more, and what its process still sends is refused."""
        if self.is_here(worker):
            self._endings[worker] = "it made no progress for too long, and the others went on without it."
        if worker in self._links:
            self._evicted.add(incarnation_of(self._links[worker]))
        self._awaited_until.pop(worker, None)

    def forget_evicted(self) -> None:
        """Who was missed here was elsewhere."""
        self._evicted.clear()

    def is_evicted(self, link: str) -> bool:
        """Whether the process of this link is."""
        return incarnation_of(link) in self._evicted

    def is_here(self, worker: Worker) -> bool:
        """Whether a worker is linked, or is expected to be in a moment."""
        return worker in self._links or self._clock() < self._awaited_until.get(worker, 0.0)

    @property
    def linked(self) -> Set[Worker]:
        """Those that have a link now."""
        return self._links.keys()

    def has_link(self, worker: Worker, link: str) -> bool:
        """Whether this is the worker's link now."""
        return self._links.get(worker) == link

    def process(self, worker: Worker) -> str:
        """The incarnation of a worker's process; "" if it has no link."""
        return incarnation_of(self._links.get(worker, ""))

    def never_seen(self) -> str:
        """The names of those that never came."""
        return ", ".join(name for worker, name in enumerate(self._names) if worker not in self.seen)

    def lost(self, worker: Worker, during: str) -> PeerLostError:
        """The error that names a worker that is not here any more."""
        ending = self._endings.get(worker)
        return lost(self._names[worker], during, f"{ending} {SEE_TASK_OUTPUT}" if ending else CONNECTION_CLOSED)


def lost(name: str, during: str, why: str = CONNECTION_CLOSED) -> PeerLostError:
    """The error that names a lost task that has no rank."""
    return PeerLostError(f"lost {name} during {during}: {why}", rank=-1, task=name, host="")
