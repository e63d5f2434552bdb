"""A task's progress in the rendezvous, shared by its threads."""

from __future__ import annotations

import threading
import time

from phalanx.cluster.membership import Rank
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.task_names import CHIEF_RANK
from phalanx.errors import PhalanxError
from phalanx.transport.listener import Listener


class RendezvousState:
    """See the top of the file. All methods may be called from any thread.

    Args:
        identity: Identity of this task.
        listener: Its port.
        timeout_s: Seconds to wait for the others.

    Attributes:
        deadline: Time at which the rendezvous times out, a value of `time.monotonic()`.
        changed: Condition that protects everything below; notified when it changes.
        missing: The tasks that this one waits for, with the reason if it is known. The chief waits for all others,
            which wait for the chief.
        blocking_reasons: Reasons that prevent the start although all tasks are present. Known only to the chief.
        failure: The error that ends the rendezvous, if any.
        is_over: Whether the job has started, or the rendezvous has ended with an error.
    """

    def __init__(self, identity: TaskIdentity, listener: Listener, timeout_s: float):
        self.identity, self.listener, self.timeout_s = identity, listener, timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.changed = threading.Condition()
        awaited = identity.other_ranks if identity.rank == CHIEF_RANK else (CHIEF_RANK,)
        self.missing: dict[Rank, str] = dict.fromkeys(awaited, "")
        self.blocking_reasons: dict[str, str] = {}
        self.failure: PhalanxError | None = None
        self.is_over = False

    def mark_present(self, rank: Rank) -> None:
        with self.changed:
            self.missing.pop(rank, None)
            self.changed.notify_all()

    def mark_missing(self, rank: Rank, cause: str) -> None:
        with self.changed:
            self.missing[rank] = cause
            self.changed.notify_all()

    def fail(self, error: PhalanxError) -> None:
        """End the rendezvous with this error, unless it is already over or has failed."""
        with self.changed:
            if self.failure is None and not self.is_over:
                self.failure = error
                self.changed.notify_all()

    def check(self) -> None:
        """Raise the failure, if any."""
        if self.failure is not None:
            raise self.failure

    def finish(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def wait_until_over(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until the rendezvous is over or has failed; return whether it is or has."""
        with self.changed:
            return self.changed.wait_for(lambda: self.is_over or self.failure is not None, timeout=timeout_s)
