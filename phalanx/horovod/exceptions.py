"""The error classes of Horovod's own that programs catch."""

from __future__ import annotations

from phalanx.errors import MembershipChangedError, PhalanxError


class HorovodInternalError(PhalanxError, RuntimeError):
    """A collective did not happen: the ranks differ in what they brought, one is gone, or the job is shut down.

    The cause is `__cause__`, one of Phalanx's own errors, and the process ends with its exit code. After a difference
    (`CollectiveMismatchError`) collectives can go on; after any other cause they cannot.
    """

    def __init__(self, message: str, *, exit_code: int | None = None):
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code

    @classmethod
    def of(cls, cause: BaseException) -> HorovodInternalError:
        """The error that tells of another one, which is its cause."""
        error = cls(str(cause) or type(cause).__name__, exit_code=getattr(cause, "exit_code", None))
        error.__cause__ = cause
        return error


class HostsUpdatedInterrupt(PhalanxError, RuntimeError):
    """Members are to join or to leave an elastic job: `hvd.elastic.run` catches it and calls its function again.

    Attributes:
        skip_sync: whether the state need not be given to anybody. Always False here: it is always given.
    """

    exit_code = MembershipChangedError.exit_code

    def __init__(self, skip_sync: bool = False):
        super().__init__("the members of the job are to change; hvd.elastic.run goes on with those that are left.")
        self.skip_sync = skip_sync
