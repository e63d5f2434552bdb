"""A parameter server: a port, and a group of shards that it leads, or two with the copy of another server's.

It serves until the workers have said that they have no more to do.
"""

from __future__ import annotations

import socket
from pathlib import Path

from phalanx.cluster.admission import PROBE, ProbeService
from phalanx.cluster.peer_registry import TaskIdentity
from phalanx.parameter_server.server.connected_workers import CHIEF
from phalanx.parameter_server.server.running_clock import RunningClock
from phalanx.parameter_server.server.shard_group import COPY, LEAD, PURPOSE, SNAPSHOT_S, ShardGroup
from phalanx.parameter_server.server.snapshots import Snapshots
from phalanx.parameter_server.server.step_schedule import POLL_S
from phalanx.transport.handshake import Hello, Welcome


class ParameterServer:
    """Serves the workers of one cluster. `run` returns when the job is over.

    Args:
        me: this task, with all that the workers must agree on.
        snapshots: where to keep what another process goes on with if this one is killed; None: nowhere.
        snapshot_s: seconds between two of them.
        copied: whether each group of shards has a copy on the next server.
    """

    def __init__(
        self,
        me: TaskIdentity,
        snapshots: Snapshots | None = None,
        snapshot_s: float = SNAPSHOT_S,
        *,
        copied: bool = False,
    ):
        self._me = me
        self._stopped = False
        servers = [task for task in me.spec.tasks if task.type == me.task.type]
        own = servers.index(me.task)
        following, before = (own + 1) % len(servers), (own - 1) % len(servers)
        other = servers[following] if copied else None
        self._clock = clock = RunningClock()
        self._groups = [ShardGroup(me, own, other=other, snapshots=snapshots, snapshot_s=snapshot_s, clock=clock)]
        if copied:
            self._groups.append(
                ShardGroup(me, before, other=servers[before], snapshots=None, snapshot_s=snapshot_s, clock=clock)
            )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until all workers have said goodbye, or `stop`.

        Args:
            sockets: that listen at this task's address; None: opened here.

        Raises:
            ConfigurationError: the port is taken.
            RendezvousError: the chief did not come in time.
            PeerLostError: the chief was lost and did not come back.
        """
        me = self._me
        listener = me.open_listener(sockets)
        listener.register(PROBE, ProbeService(me))
        for group in self._groups:
            listener.register(f"{PURPOSE}/{group.number}", group)
            listener.register(f"{LEAD}/{group.number}", _Call(group, str(me.tasks[CHIEF])))
            listener.register(f"{COPY}/{group.number}", _Copying(group))
        with listener:
            try:
                for group in self._groups:
                    group.start()
                while not self._stopped and not self._is_over():
                    self._clock.tick()
                    self._groups[0].wait(POLL_S)
            finally:
                for group in self._groups:
                    group.close()

    def stop(self) -> None:
        """Let `run` end now; workers that are still there lose their server."""
        self._stopped = True
        self._groups[0].wake()

    def _is_over(self) -> bool:
        over = [group.is_over() for group in self._groups]  # all are asked: each may have an error to raise
        return all(over)


class _Call:
    """The chief, which has lost the leader of a group, calls upon the copy to lead it."""

    def __init__(self, group: ShardGroup, chief: str):
        self._group = group
        self._chief = chief
        self.adopt = group.adopt

    def admit(self, hello: Hello) -> Welcome:
        if hello.task == self._chief:
            self._group.lead()
        return self._group.admit(hello)


class _Copying:
    """The leader of a group keeps its copy here."""

    def __init__(self, group: ShardGroup):
        self.admit = group.admit_leader
        self.adopt = group.adopt_leader


def snapshots_of(me: TaskIdentity, folder: Path | None) -> Snapshots | None:
    """Where this server keeps its snapshots: in a folder, in the launcher's files, or nowhere."""
    if folder is not None:
        return Snapshots.of_task(folder, str(me.task))
    return None if me.config.snapshots is None else Snapshots(me.config.snapshots)
