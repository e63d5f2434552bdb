"""The links to other tasks, as the threads of a rendezvous share them."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from dataclasses import dataclass

from phalanx.cluster.membership import Rank
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import PhalanxError
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Peer:
    """Another task that this one has a link to.

    Attributes:
        description: how it described itself.
        link: the link to it.
        missing: known to the chief only: the tasks that the peer reported to have no link to, with reasons; None
            before its first report.
    """

    description: TaskDescription
    link: Link
    missing: dict[str, str] | None = None


class PeerRegistry:
    """The links established so far, and how the rendezvous ended. All methods may be called from any thread.

    Attributes:
        failure: the error that ends the rendezvous, if there is one.
        joined: whether the job has begun.
        wakeup: a socket that is readable when something has changed, for the thread that polls it with the links.
    """

    def __init__(self, me: TaskIdentity):
        self._me = me
        # Protects everything below; notified when a link is added or removed, and at the end.
        self._changed = threading.Condition()
        self._peers: dict[Rank, Peer] = {}
        self._departed: dict[Rank, Peer] = {}  # the last peer of each rank whose link broke
        self._causes: dict[Rank, str] = {}
        self._seen: set[Rank] = set()
        self.failure: PhalanxError | None = None
        self.joined = False
        self._over = False
        self.wakeup, self._wakeup_sender = socket.socketpair()
        self.wakeup.setblocking(False)
        self._wakeup_sender.setblocking(False)

    def close(self) -> None:
        self.wakeup.close()
        self._wakeup_sender.close()

    def add(self, rank: Rank, peer: Peer) -> None:
        """Add a link to another task; it replaces a previous one."""
        with self._changed:
            previous = self._peers.get(rank)
            is_late = self._over
            if not is_late:
                self._peers[rank] = peer
                self._causes.pop(rank, None)
                self._changed.notify_all()
        if is_late:
            peer.link.close()
        elif previous is not None:
            previous.link.close()
        self._wake()

    def remove(self, rank: Rank, peer: Peer, cause: str) -> None:
        """Remove a broken link, unless it has been replaced already. A new one may follow."""
        with self._changed:
            if self._peers.get(rank) is not peer:
                return
            del self._peers[rank]
            self._departed[rank] = peer
            self._causes[rank] = cause
            self._changed.notify_all()
        logger.debug("%s lost %s before the start: %s", self._me.task, self._me.tasks[rank], cause)
        peer.link.close()

    def set_cause(self, rank: Rank, cause: str) -> None:
        """Record why there is no link to a task yet."""
        with self._changed:
            self._causes[rank] = cause

    def mark_seen(self, rank: Rank) -> None:
        """Record that a task has answered, successfully or not."""
        with self._changed:
            self._seen.add(rank)

    def has_seen(self, rank: Rank) -> bool:
        """Whether a task has ever answered."""
        with self._changed:
            return rank in self._seen or rank in self._peers or rank in self._departed

    def fail(self, error: PhalanxError) -> None:
        """End the rendezvous with this error, unless it is over or has failed already."""
        with self._changed:
            if self.failure is None and not self._over:
                self.failure = error
        self._wake()

    def finish(self, *, joined: bool) -> None:
        """End the rendezvous: later links are closed and later errors ignored."""
        with self._changed:
            self.joined = joined
            self._over = True
            self._changed.notify_all()

    @property
    def peers(self) -> dict[Rank, Peer]:
        """A copy."""
        with self._changed:
            return dict(self._peers)

    @property
    def last_peers(self) -> dict[Rank, Peer]:
        """As `peers`, plus peers whose link has broken, with that closed link."""
        with self._changed:
            return {**self._departed, **self._peers}

    def missing(self) -> dict[str, str]:
        """The tasks without a link in rank order, each with the reason, or an empty string."""
        with self._changed:
            return {
                str(self._me.tasks[rank]): self._causes.get(rank, "")
                for rank in self._me.other_ranks
                if rank not in self._peers
            }

    def wait_until_absent(self, rank: Rank) -> bool:
        """Wait until there is no link to `rank`; False if the rendezvous is over."""
        with self._changed:  # the rendezvous has a deadline
            self._changed.wait_for(lambda: self._over or rank not in self._peers)
            return not self._over

    def wait_until_over(self, timeout_s: float) -> bool:
        """Wait until the rendezvous is over, for at most `timeout_s`; whether it is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over, timeout=timeout_s)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full, so it is readable anyway; or closed
            self._wakeup_sender.send(b"\0")
