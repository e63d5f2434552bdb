"""Questions and wishes of people about an elastic job: `phalanx status`, `phalanx scale`."""

from __future__ import annotations

import time

import msgspec

from phalanx.config.job_config import TLSFiles
from phalanx.errors import ConfigurationError
from phalanx.transport.address import Address
from phalanx.transport.dial import RefusedError, dial
from phalanx.transport.handshake import Hello
from phalanx.transport.tls import load_tls

CONTROL = "control"
"""Purpose of a connection that asks the keeper for its state, or for other numbers of members."""
IMPOSSIBLE = "impossible"
"""Refusal: what is wished for cannot be."""
ANSWER_S = 5.0


class ScaleRequest(msgspec.Struct, frozen=True):
    """So many members are wanted; None: only the state is asked for."""

    workers: int | None = None


class MemberState(msgspec.Struct, frozen=True):
    """A process of the job; `rank` is -1 for one that is not let in yet.

    Attributes:
        phase, epoch, step: what it did when it was last heard of, `age_s` seconds ago.
        silent_s: since it was last heard of.
        compute_s, wait_s: seconds for each step outside of collectives and in them, over the last seconds; None where
            not known.
        slow: whether the others wait for it.
    """

    rank: int
    task: str
    host: str
    pid: int
    phase: str
    epoch: int | None
    step: int | None
    age_s: float
    silent_s: float
    compute_s: float | None = None
    wait_s: float | None = None
    slow: bool = False


class HostState(msgspec.Struct, frozen=True):
    """A host on which members may run.

    Attributes:
        slots, taken: how many members it can run, and runs.
        aside_until: by the monotonic clock of the launcher's host, if it is set aside; `reason` says why.
    """

    name: str
    slots: int
    taken: int
    aside_until: float | None = None
    reason: str = ""


class JobState(msgspec.Struct, frozen=True):
    """What the keeper knows.

    Attributes:
        generation: 0 before all have come.
        minimum, maximum: members.
        steps_per_s: over the last seconds; 0 where not known.
    """

    generation: int
    minimum: int
    maximum: int
    regrouping: bool
    steps_per_s: float
    members: list[MemberState]
    hosts: list[HostState] = []


def ask(keeper: str, secret: str, job: str, wish: ScaleRequest, *, tls: TLSFiles | None = None) -> JobState:
    """Ask the keeper of a job.

    Args:
        tls: what the job encrypts with, if it does.

    Raises: ConfigurationError if the wish cannot be fulfilled; LinkClosedError, LinkTimeoutError if nobody answers.
    """
    hello = Hello(purpose=CONTROL, task="phalanx", job=job, details=msgspec.msgpack.encode(wish))
    address = Address.parse(keeper, where="the job's file")
    try:
        link, welcome = dial(
            address,
            hello,
            peer="the launcher",
            secret=secret.encode(),
            tls=load_tls(tls),
            deadline=time.monotonic() + ANSWER_S,
        )
    except RefusedError as error:
        raise ConfigurationError(error.welcome.reason) from error
    link.close()
    return msgspec.msgpack.decode(welcome.details, type=JobState)
