"""The identity of this process in its job, used to listen and dial."""

from __future__ import annotations

import os
import secrets
import socket

from phalanx.cluster.membership import Rank
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts, TaskDescription, cluster_by_task
from phalanx.config.job_config import JobConfig
from phalanx.runtime.host_identity import host_identity
from phalanx.transport.address import Address
from phalanx.transport.credentials import Credentials
from phalanx.transport.dial import dial
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.ports import open_listening_sockets
from phalanx.transport.tls import load_tls
from phalanx.version import __version__


class TaskIdentity:
    """This process's task in the cluster, and how it listens and connects to others. Immutable.

    Args:
        spec: The cluster, with the address of this task if it listens.
        task: The task of this process.
        facts: Facts that all tasks must agree on.
        config: The configuration of the job.
        is_elastic: Whether members join and leave, so that tasks do not compare their clusters.

    Attributes:
        tasks: The tasks that have a rank, in rank order.
        rank: The rank of this task; -1 if it has none.
        other_ranks: All other ranks.
        description: The description of this task that others receive.
    """

    def __init__(self, spec: ClusterSpec, task: Task, facts: JobFacts, config: JobConfig, *, is_elastic: bool = False):
        self.spec = spec
        self.task = task
        self.config = config
        self.tasks = spec.ranked_tasks
        self.rank: Rank = self.tasks.index(task) if task in self.tasks else -1
        self.other_ranks = tuple(rank for rank in range(len(self.tasks)) if rank != self.rank)
        self.credentials = Credentials(config.secret, load_tls(config.tls), config.encryption)
        self.description = TaskDescription(
            task=str(task),
            incarnation=secrets.token_hex(8),  # pids repeat: in containers, and when a task restarts
            host=host_identity(config.host_id),
            address=str(spec.address(task)) if task in spec else "",
            pid=os.getpid(),
            cluster={} if is_elastic else cluster_by_task(spec),
            phalanx=__version__,
            facts=facts,
        )

    @property
    def address(self) -> Address:
        return self.spec.address(self.task)

    def open_listener(self, sockets: list[socket.socket] | None = None) -> Listener:
        """Return a listener for this task's port, not yet started.

        Args:
            sockets: Sockets that already listen at this task's address; None opens them.

        Raises: ConfigurationError as `open_listening_sockets`.
        """
        config = self.config
        sockets = sockets or open_listening_sockets(self.address, secret=config.secret, listen_fd=config.listen_fd)
        return Listener(sockets, task=str(self.task), credentials=self.credentials, job=config.job_id)

    def rank_of(self, task: str) -> Rank | None:
        """Return the rank of the task with this name; None if it has none."""
        return next((rank for rank, known in enumerate(self.tasks) if str(known) == task), None)

    def dial(
        self, task: Task, purpose: str, details: bytes = b"", *, deadline: float, bulk: bool = False
    ) -> tuple[Link, Welcome]:
        """Connect to another task of the cluster; see `dial_address`."""
        return self.dial_address(self.spec.address(task), str(task), purpose, details, deadline=deadline, bulk=bulk)

    def dial_address(
        self,
        address: Address,
        peer: str,
        purpose: str,
        details: bytes = b"",
        *,
        deadline: float,
        bulk: bool = False,
    ) -> tuple[Link, Welcome]:
        """Connect to another process of the job for a purpose.

        Args:
            address: Address where it listens.
            peer: Its name; a process with another name refuses.
            purpose: The service that receives the link there.
            details: Data for that service.
            deadline: Time to give up, a value of `time.monotonic()`.
            bulk: Whether the link carries training data; see `Encryption`.

        Returns, raises: as `phalanx.transport.dial.dial`.
        """
        hello = Hello(
            purpose=purpose,
            task=self.description.task,
            peer=peer,
            job=self.config.job_id,
            incarnation=self.description.incarnation,
            details=details,
        )
        return dial(address, hello, credentials=self.credentials, bulk=bulk, deadline=deadline)
