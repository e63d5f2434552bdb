"""The errors a user of Phalanx can meet, one class for each remedy.

Every class carries an `exit_code`: a process that ends because of the error ends with that code, so that
a script around the job can tell the causes apart. `docs/failures.md` lists them.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class PhalanxError(Exception):
    """Base of all errors that Phalanx raises on purpose; on its own, a defect in Phalanx."""

    exit_code = 70


class ConfigurationError(PhalanxError, ValueError):
    """The job is described wrongly (TF_CONFIG, arguments, environment). Correct it and start again."""

    exit_code = 64


class UnsupportedError(PhalanxError, NotImplementedError):
    """What was asked cannot be done on this backend or strategy. The message names what can."""

    exit_code = 65


class RendezvousError(PhalanxError):
    """The tasks of the job did not find each other in time. The message names who is missing."""

    exit_code = 66


class DisagreementError(PhalanxError):
    """The tasks of the job differ in what must be equal. The message names both sides and both values."""

    exit_code = 67


class CollectiveMismatchError(PhalanxError):
    """The ranks called different collectives, or the same one with other shapes, dtypes or operation.

    Raised on every rank. The communicator cannot be used afterwards.
    """

    exit_code = 68


class CollectiveTimeoutError(PhalanxError, TimeoutError):
    """A rank is connected but did not come to the collective in time. The communicator is closed."""

    exit_code = 69


class PeerLostError(PhalanxError, ConnectionError):
    """A member of the job died or left. Raised on every survivor; a new generation can be formed.

    Attributes:
        rank: the rank that was lost.
        task: its task, for example `worker/1`.
        host: the host it ran on.
    """

    exit_code = 71

    def __init__(self, message: str, *, rank: int, task: str, host: str):
        super().__init__(message)
        self.rank = rank
        self.task = task
        self.host = host

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled as its class and `args`, which lack the keyword arguments.
        rebuild = partial(PeerLostError, rank=self.rank, task=self.task, host=self.host)
        return rebuild, (str(self),)


class MembershipChangedError(PhalanxError, ConnectionError):
    """The job has another membership now, and what was begun under the former one must be begun again.

    Raised on every member, at the same collective, in jobs whose members come and go (`phalanx run --workers 2:4`).
    `fit`, `evaluate` and `predict` deal with it; in a loop of your own, `phalanx.elastic.run` does.
    """

    exit_code = 71


class EvictedError(PhalanxError):
    """This worker made no progress for too long, and the others went on without it. Started again, it takes part."""

    exit_code = 73


class PreemptedError(PhalanxError):
    """The job was told to end (SIGTERM) and has taken a checkpoint. Start the same program again: it goes on there."""

    exit_code = 75


class LinkClosedError(PhalanxError, ConnectionError):
    """The other end of a link is gone. The layer above says which member that was (`PeerLostError`)."""

    exit_code = 71


class LinkTimeoutError(PhalanxError, TimeoutError):
    """The other end of a link neither sent nor read anything until the deadline.

    Attributes:
        peer: who is at the other end, as far as that is known, for example `ps/0`.
    """

    exit_code = 69

    def __init__(self, message: str, peer: str = ""):
        super().__init__(message)
        self.peer = peer


class HandshakeError(PhalanxError):
    """A connection was refused before anything was read from it: not one of ours, or the wrong secret."""

    exit_code = 66


class FrameError(PhalanxError):
    """What came over a link is no message of ours, or one over the limits. The link is closed."""

    exit_code = 72
