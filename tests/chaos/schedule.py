"""What is to go wrong in a job, and when: it follows from a seed. Nothing here does anything."""

from __future__ import annotations

import enum
import random
from collections.abc import Collection
from dataclasses import dataclass

from tests.support.weather import Weather

MINIMUM, WORKERS = 1, 3
FIRST_STEP = 3
LAST_SHARE = 0.7
"""Of the steps of a job; a fault behind it might come too late."""
NETWORKED_SHARE = 0.4
"""How many jobs have a host for each worker."""
CHIEF_SHARE = 0.4
"""How often the chief is the victim."""


class Kind(enum.StrEnum):
    """What goes wrong. The victim is a member, where none other is named."""

    KILL = "kill"
    """kill -9."""
    KILL_ALL = "kill all"
    """kill -9 of all members at once: the launcher starts the whole job again."""
    KILL_LAUNCHER = "kill launcher"
    """kill -9 of the launcher, which is started again by hand."""
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT before the others lose their patience."""
    ZOMBIE = "zombie"
    """SIGSTOP, and SIGCONT when the others may have gone on without it."""
    STOP = "stop"
    """SIGSTOP for good."""
    DISCONNECT = "disconnect"
    """A connection between two members is broken off."""
    FILL_DISK = "fill disk"
    """No checkpoint can be written for a while."""
    DAMAGE = "damage"
    """The newest checkpoint loses its end or gets other bytes, and all members are killed."""

    CUT = "cut"
    """The cable of the victim: silence, no reset. It is mended later."""
    SEVER = "sever"
    """Two members cannot reach each other; the launcher reaches both."""
    HALF_OPEN = "half open"
    """The victim is killed without notice: its connections stay open at the other ends."""
    SLOW = "slow"
    """A narrow cable with a long queue."""


ON_NETWORKS = frozenset({Kind.CUT, Kind.SEVER, Kind.HALF_OPEN, Kind.SLOW})
"""Those that need hosts of their own (`tests.support.network`)."""

_WEIGHTS = {
    Kind.KILL: 8,
    Kind.KILL_ALL: 1,
    Kind.KILL_LAUNCHER: 2,
    Kind.PAUSE: 2,
    Kind.ZOMBIE: 1,
    Kind.STOP: 2,
    Kind.DISCONNECT: 3,
    Kind.FILL_DISK: 2,
    Kind.DAMAGE: 2,
    Kind.CUT: 8,
    Kind.SEVER: 8,
    Kind.HALF_OPEN: 8,
    Kind.SLOW: 4,
}
_LASTS_S = {
    Kind.PAUSE: (0.1, 0.6),
    Kind.ZOMBIE: (0.9, 2.0),
    Kind.CUT: (0.2, 2.5),
    Kind.SEVER: (0.2, 3.0),
    Kind.HALF_OPEN: (0.0, 2.0),
    Kind.SLOW: (0.2, 1.0),
    Kind.FILL_DISK: (0.2, 1.0),
}
"""In units of the job's timeout: some end before the others lose their patience, some after it."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong once the job has made `step` steps.

    Attributes:
        chief: whether the victim is the chief; else it is one of the others, if there is one.
        choice: which of them, and whatever else is left open: from 0 to 1.
        lasts_s: until it is over; 0 for what cannot be undone.
    """

    step: int
    kind: Kind
    chief: bool = False
    choice: float = 0.0
    lasts_s: float = 0.0

    def __str__(self) -> str:
        whom = " chief" if self.chief else ""
        lasts = f" {self.lasts_s:.1f}s" if self.lasts_s else ""
        return f"{self.kind}{whom}{lasts} @{self.step}"


@dataclass(frozen=True)
class Plan:
    """One job, and what goes wrong in it.

    Attributes:
        networked: whether each worker has a host of its own.
        timeout_s: PHALANX_TIMEOUT of the job.
        weather: of the hosts' cables; None: they are good.
    """

    seed: int
    faults: tuple[Fault, ...]
    networked: bool
    timeout_s: float
    weather: Weather | None = None


def plan(seed: int, *, steps: int, faults: int, able: Collection[Kind], timeout_s: float) -> Plan:
    """The faults of one job, in the order in which they come.

    Args:
        steps: that the job makes.
        faults: how many.
        able: what can be done on this machine.
    """
    chance = random.Random(seed)
    needs_networks = not set(able) - ON_NETWORKS
    networked = (chance.random() < NETWORKED_SHARE or needs_networks) and bool(ON_NETWORKS & set(able))
    kinds = [kind for kind in Kind if kind in able and (networked or kind not in ON_NETWORKS)]
    last = max(FIRST_STEP, int(steps * LAST_SHARE))
    times = sorted(chance.randint(FIRST_STEP, last) for _ in range(faults))
    found = []
    for step in times:
        (kind,) = chance.choices(kinds, [_WEIGHTS[kind] for kind in kinds])
        low, high = _LASTS_S.get(kind, (0.0, 0.0))
        found.append(
            Fault(
                step,
                kind,
                chief=chance.random() < CHIEF_SHARE,
                choice=chance.random(),
                lasts_s=round(chance.uniform(low, high) * timeout_s, 2),
            )
        )
    return Plan(seed, tuple(found), networked, timeout_s)


def kills(seed: int, *, steps: int, count: int, timeout_s: float) -> Plan:
    """So many kill -9 at random moments, the chief among the victims; arguments as for `plan`."""
    chance = random.Random(seed)
    times = sorted(chance.sample(range(FIRST_STEP, int(steps * LAST_SHARE)), count))
    chief = chance.randrange(count)
    found = [
        Fault(step, Kind.KILL, chief=number == chief or chance.random() < CHIEF_SHARE, choice=chance.random())
        for number, step in enumerate(times)
    ]
    return Plan(seed, tuple(found), False, timeout_s)
