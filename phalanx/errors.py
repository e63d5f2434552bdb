"""The errors that users of Phalanx may see, one class per remedy.

Every class has an `exit_code`, the exit code of a process that ends with the error, so that scripts can distinguish
causes. `docs/reference/exit-codes.md` lists them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

SIGNAL_BASE = 128
"""Base of the exit code of a process ended by a signal, to which the signal's number is added, as in a shell."""


class PhalanxError(Exception):
    """Base class of all errors that Phalanx raises on purpose. If raised itself, it reports a bug in Phalanx."""

    exit_code = 70


class ConfigurationError(PhalanxError, ValueError):
    """The description of the job is wrong (TF_CONFIG, arguments, environment). Correct it and restart."""

    exit_code = 64


class UnsupportedError(PhalanxError, NotImplementedError):
    """This backend or strategy does not support the request. The message names an alternative."""

    exit_code = 65


class RendezvousError(PhalanxError):
    """The tasks of the job did not find each other in time. The message names the missing tasks."""

    exit_code = 66


class DisagreementError(PhalanxError):
    """The tasks of the job disagree on a value that must be equal. The message names both sides and both values."""

    exit_code = 67


class CollectiveMismatchError(PhalanxError):
    """The ranks called different collectives, or the same one with different shapes, dtypes or operations.

    Raised on every rank. The communicator cannot be used afterwards.
    """

    exit_code = 68


class CollectiveTimeoutError(PhalanxError, TimeoutError):
    """A rank is connected but did not join the collective in time. The communicator is closed."""

    exit_code = 69


class PeerLostError(PhalanxError, ConnectionError):
    """A member of the job died or left. Raised on every survivor; a new generation can be formed.

    Attributes:
        rank: Rank of the lost member.
        task: Task of the lost member, for example `worker/1`.
        host: Host of the lost member.
    """

    exit_code = 71

    def __init__(self, message: str, *, rank: int, task: str, host: str):
        super().__init__(message)
        self.rank = rank
        self.task = task
        self.host = host

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, an exception is pickled as its class and `args`, which lack the keyword arguments.
        rebuild = partial(PeerLostError, rank=self.rank, task=self.task, host=self.host)
        return rebuild, (str(self),)


class MembershipChangedError(PhalanxError, ConnectionError):
    """The membership of the job has changed, and the work begun under the previous one must restart.

    Raised on every member, at the same collective, in elastic jobs (`phalanx run --workers 2:4`). `fit`, `evaluate` and
    `predict` handle it; in custom training loops, `phalanx.elastic.run` does.
    """

    exit_code = 71


class EvictedError(PhalanxError):
    """This worker made no progress for too long, and the others continued without it. It may rejoin after a restart."""

    exit_code = 73


class PreemptedError(PhalanxError):
    """The job was preempted (SIGTERM) and has saved a checkpoint. Start the same program again to resume from it."""

    exit_code = 75


class SupersededError(PhalanxError):
    """Another process of the job, or another job, has claimed the directory to which this process wrote checkpoints."""

    exit_code = 74


class LinkClosedError(PhalanxError, ConnectionError):
    """The other end of a link is gone. The layer above names the member (`PeerLostError`)."""

    exit_code = 71


class LinkTimeoutError(PhalanxError, TimeoutError):
    """The other end of a link neither sent nor read anything before the deadline.

    Attributes:
        peer: Name of the other end, for example `ps/0`; empty if unknown.
    """

    exit_code = 69

    def __init__(self, message: str, peer: str = ""):
        super().__init__(message)
        self.peer = peer


class HandshakeError(PhalanxError):
    """A connection was refused: it is not from this job, or has the wrong secret."""

    exit_code = 66


class FrameError(PhalanxError):
    """Bytes received over a link are not a valid message, or exceed a limit. The link is closed."""

    exit_code = 72
