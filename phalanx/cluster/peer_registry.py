"""The state that the threads of a rendezvous share: this task's identity, and its links to other tasks."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from dataclasses import dataclass

from phalanx.cluster.compatibility import JobFacts, TaskDescription, cluster_by_task
from phalanx.cluster.host_identity import host_identity
from phalanx.cluster.membership import Rank
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.config.job_config import JobConfig
from phalanx.errors import PhalanxError
from phalanx.transport.address import Address
from phalanx.transport.dial import dial
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.ports import open_listening_sockets
from phalanx.transport.tls import load_tls
from phalanx.version import __version__

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


class TaskIdentity:
    """This process's task in the cluster, and how it connects to the other tasks. Immutable.

    Attributes:
        tasks: the tasks that have a rank, in rank order.
        rank: the rank of this task; -1 if it has none.
        other_ranks: all other ranks.
        description: how this task describes itself to others.
    """

    def __init__(self, spec: ClusterSpec, task: Task, facts: JobFacts, config: JobConfig):
        self.spec = spec
        self.task = task
        self.config = config
        self.tasks = spec.ranked_tasks
        self.rank: Rank = self.tasks.index(task) if task in self.tasks else -1
        self.other_ranks = tuple(rank for rank in range(len(self.tasks)) if rank != self.rank)
        self.tls = load_tls(config.tls)
        self.description = TaskDescription(
            task=str(task),
            incarnation=secrets.token_hex(8),
            host=host_identity(config.host_id),
            address=str(spec.address(task)) if task in spec else "",
            pid=os.getpid(),
            cluster=cluster_by_task(spec),
            phalanx=__version__,
            facts=facts,
        )

    @property
    def address(self) -> Address:
        return self.spec.address(self.task)

    def open_listener(self, sockets: list[socket.socket] | None = None) -> Listener:
        """A listener for this task's port, not yet started.

        Args:
            sockets: that listen at this task's address already; None opens them.

        Raises: ConfigurationError as `open_listening_sockets`.
        """
        config = self.config
        sockets = sockets or open_listening_sockets(self.address, secret=config.secret, listen_fd=config.listen_fd)
        return Listener(sockets, task=str(self.task), secret=config.secret, job=config.job_id, tls=self.tls)

    def rank_of(self, task: str) -> Rank | None:
        """The rank of a task by its name; None if it has none."""
        return next((rank for rank, known in enumerate(self.tasks) if str(known) == task), None)

    def dial(self, task: Task, purpose: str, details: bytes = b"", *, deadline: float) -> tuple[Link, Welcome]:
        """Connect to another task for a purpose; raises as `phalanx.transport.dial.dial`."""
        hello = Hello(
            purpose=purpose,
            task=self.description.task,
            job=self.config.job_id,
            incarnation=self.description.incarnation,
            details=details,
        )
        return dial(
            self.spec.address(task),
            hello,
            peer=str(task),
            secret=self.config.secret,
            tls=self.tls,
            deadline=deadline,
        )


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
        with self._changed:
            self._changed.wait_for(lambda: self._over or rank not in self._peers)
            return not self._over

    def wait_until_over(self, timeout_s: float) -> bool:
        """Wait until the rendezvous is over, for at most `timeout_s`; whether it is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over, timeout=timeout_s)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full, so it is readable anyway; or closed
            self._wakeup_sender.send(b"\0")
