"""A parameter server: a port, the group of shards that it leads, and with replication another server's replica.

It serves until the workers have finished.
"""

from __future__ import annotations

import socket
from pathlib import Path

from phalanx.cluster.peer_identification import PROBE, ProbeService
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.monitoring.worker_figures import ServerFigures
from phalanx.parameter_server.server.running_clock import RunningClock
from phalanx.parameter_server.server.shard_group import SNAPSHOT_INTERVAL_S, ShardGroup
from phalanx.parameter_server.server.snapshots import Snapshots
from phalanx.parameter_server.server.worker_membership import POLL_S
from phalanx.parameter_server.server_protocol import (
    CHIEF_WORKER,
    GROUP_PURPOSE,
    LEASE_PURPOSE,
    PROMOTE_PURPOSE,
    REPLICATE_PURPOSE,
)
from phalanx.transport.handshake import Hello, Welcome


class ParameterServer:
    """Serves the workers of one cluster. `run` returns when the job is over.

    Args:
        me: This task, with everything that the workers must agree on.
        snapshots: Storage of the state for a process that replaces this one if it is killed; None: no snapshots.
        snapshot_interval_s: Seconds between two snapshots.
        is_replicated: Whether each group of shards has a replica on the next server.
    """

    def __init__(
        self,
        me: TaskIdentity,
        snapshots: Snapshots | None = None,
        snapshot_interval_s: float = SNAPSHOT_INTERVAL_S,
        *,
        is_replicated: bool = False,
    ):
        self._me = me
        self._stopped = False
        servers = [task for task in me.spec.tasks if task.type == me.task.type]
        own = servers.index(me.task)
        following, before = (own + 1) % len(servers), (own - 1) % len(servers)
        # A ring: this server's group has its replica on the next server, and this server keeps that of the previous
        # one. It leads both if that server is lost.
        other = servers[following] if is_replicated else None
        self._clock = clock = RunningClock()
        self._groups = [
            ShardGroup(me, own, other=other, snapshots=snapshots, snapshot_interval_s=snapshot_interval_s, clock=clock)
        ]
        if is_replicated:
            self._groups.append(
                ShardGroup(
                    me,
                    before,
                    other=servers[before],
                    snapshots=None,
                    snapshot_interval_s=snapshot_interval_s,
                    clock=clock,
                )
            )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until all workers have left, or until `stop`.

        Args:
            sockets: Sockets that listen at this task's address; None: they are opened here.

        Raises:
            ConfigurationError: the port is taken.
            RendezvousError: the chief did not connect in time.
            PeerLostError: the chief was lost and did not return.
        """
        me = self._me
        listener = me.open_listener(sockets)
        listener.register(PROBE, ProbeService(me))
        for group in self._groups:
            listener.register(f"{GROUP_PURPOSE}/{group.number}", group)
            # Both may have to wait until a record from the leader is applied, such as all values of a large model.
            promotion = _PromotionService(group, str(me.tasks[CHIEF_WORKER]))
            listener.register(f"{PROMOTE_PURPOSE}/{group.number}", promotion, blocks=True)
            listener.register(f"{LEASE_PURPOSE}/{group.number}", group.lease)
            listener.register(f"{REPLICATE_PURPOSE}/{group.number}", group.leadership, blocks=True)
        with listener:
            try:
                for group in self._groups:
                    group.start()
                while not self._stopped and not self._is_over():
                    self._clock.tick()
                    self._groups[0].wait(POLL_S)  # a change in the other group is noticed within this time
            finally:
                for group in self._groups:
                    group.close()

    @property
    def figures(self) -> ServerFigures:
        """Figures of this server, for monitoring. May be read from any thread."""
        led = [group.figures for group in self._groups if group.leadership.is_leading]
        return ServerFigures(
            version=max((group.version for group in led), default=0),
            workers=max((group.workers for group in led), default=0),
        )

    def stop(self) -> None:
        """End `run` now; workers that are still connected lose their server."""
        self._stopped = True
        self._groups[0].wake()

    def _is_over(self) -> bool:
        over = [group.is_over() for group in self._groups]  # every group may have an error to raise
        return all(over)


class _PromotionService:
    """Service for a chief that has lost the leader of a group, and promotes the replica to lead it."""

    def __init__(self, group: ShardGroup, chief: str):
        self._group = group
        self._chief = chief
        self.adopt = group.adopt

    def admit(self, hello: Hello) -> Welcome:
        if hello.task == self._chief:
            self._group.leadership.become_leader()
        return self._group.admit(hello)


def snapshots_of(me: TaskIdentity, folder: Path | None) -> Snapshots | None:
    """Snapshots of this server: in a folder, in the launcher's files, or None."""
    if folder is not None:
        return Snapshots.of_task(folder, str(me.task))
    return None if me.config.snapshots is None else Snapshots(me.config.snapshots)
