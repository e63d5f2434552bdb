"""Horovod's error classes, which programs catch."""

from __future__ import annotations

from phalanx.errors import MembershipChangedError, PhalanxError


class HorovodInternalError(PhalanxError, RuntimeError):
    """A collective failed: the ranks' arguments differ, a rank is lost, or the job is shut down.

    `__cause__` is one of Phalanx's errors, which determines the exit code of the process. After differing arguments
    (`CollectiveMismatchError`), more collectives are possible; after any other cause, they are not.
    """

    def __init__(self, message: str, *, exit_code: int | None = None):
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code

    @classmethod
    def of(cls, cause: BaseException) -> HorovodInternalError:
        """Return an error with the message and exit code of another one, which is its cause."""
        error = cls(str(cause) or type(cause).__name__, exit_code=getattr(cause, "exit_code", None))
        error.__cause__ = cause
        return error


class DuplicateNameError(HorovodInternalError, ValueError):
    """Two operations with the same name run concurrently. Horovod's callers expect a ValueError from some bindings."""


class HostsUpdatedInterrupt(PhalanxError, RuntimeError):
    """Members join or leave an elastic job: `hvd.elastic.run` catches this and calls its function again.

    Attributes:
        skip_sync: Whether to skip the synchronization of the state. Always False here.
    """

    exit_code = MembershipChangedError.exit_code

    def __init__(self, skip_sync: bool = False):
        super().__init__("the members of the job are changing; hvd.elastic.run continues with the new ones.")
        self.skip_sync = skip_sync
