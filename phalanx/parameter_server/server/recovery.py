"""How training goes on when a server was lost: its snapshots, and what the workers that come back say of themselves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from phalanx.cluster.peer_registry import TaskIdentity
from phalanx.cluster.spec import Task
from phalanx.errors import PeerLostError
from phalanx.parameter_server.server.connected_workers import Worker
from phalanx.parameter_server.server.snapshots import Snapshots
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.variable_store import VariableStore
from phalanx.parameter_server.server_messages import DeclareModel, GroupState, Rejoin

logger = logging.getLogger(__name__)

_STATES = msgspec.msgpack.Decoder(GroupState)


class TrainingRecovery:
    """What came before this process leads a group of shards, if anything did, and what is kept for the one after it.

    Args:
        me: this task.
        snapshots: where to keep what another process goes on with if this one is killed; None: nowhere.
        copied_by: the server that keeps a copy, if one does.

    Attributes:
        took_over: whether another process led before, in the middle of the job.
    """

    def __init__(
        self,
        me: TaskIdentity,
        store: VariableStore,
        schedule: StepSchedule,
        snapshots: Snapshots | None,
        *,
        is_head: bool,
        copied_by: Task | None = None,
    ):
        self._me = me
        self._store = store
        self._schedule = schedule
        self._is_head = is_head
        self._copied_by = copied_by
        self._snapshots = snapshots
        self._found = None if snapshots is None else snapshots.newest()
        self._restoring = threading.Lock()
        self.took_over = False
        self._must_rebuild = False  # whether the schedule must be made anew
        self._restored = 0  # the version with which this went on
        self._lost_updates = 0
        self._met: set[Worker] = set()  # those that have nothing to tell any more of who led before

    def take_the_lead(self) -> None:
        """This process has become the leader, with the values that it has."""
        self.took_over = self._must_rebuild = self._store.fit >= 0
        self._restored, self._lost_updates = self._store.version, 0
        self._met.clear()
        self._schedule.await_workers()

    def declare(self, message: DeclareModel, buffers: Sequence[memoryview]) -> None:
        """A `fit` begins; from now on there is a snapshot of it."""
        with self._restoring:
            self._must_rebuild = False
            self._store.declare(message, buffers)
        self.write_snapshot()

    def keep(self, seconds: float, closing: threading.Event) -> None:
        """Write a snapshot every so many seconds, if there is something new, until `closing`. The body of a thread."""
        written = -1
        while not closing.wait(seconds):
            version = self._store.version
            if version != written and self.write_snapshot():
                written = version

    def clear(self) -> None:
        """Nobody will go on with the snapshots."""
        if self._snapshots is not None:
            self._snapshots.clear()

    def write_snapshot(self) -> bool:
        """Whether there is one of what this has now."""
        with self._restoring:  # one at a time, each of newer values than the one before
            state = self._store.state()
            if self._snapshots is None or state is None:
                return False
            try:
                self._snapshots.write(msgspec.msgpack.encode(state[0]), state[1])
            except OSError as error:
                logger.warning(
                    "%s cannot write its snapshot (%s); if it is killed, more updates will be lost.",
                    self._me.task,
                    error.strerror or error,
                )
                return False
        return True

    def meet(self, worker: Worker) -> None:
        """A worker begins a `fit` here: all that it knows from now on is this process's."""
        self._met.add(worker)

    def take_back(self, worker: Worker, message: Rejoin, buffers: Sequence[memoryview]) -> None:
        """A worker has lost its link to this task in the middle of a `fit`, perhaps because the process is new."""
        with self._restoring:
            if self._store.fit < message.fit:
                self._restore(message)
            scheduled = self._is_head and message.epoch >= 0 and message.era == self._schedule.era
            if self._must_rebuild and scheduled:
                self._must_rebuild = False
                if not self._schedule.has_ended(message.fit):
                    self._schedule.await_rejoins()
            missing = max(0, message.version - self._restored)
            # One that only its network had cut off has seen nothing that this process has not. Others may come late,
            # when as many new updates have been made as were lost.
            ahead = self._lost_updates < 0 or worker not in self._met or message.version > self._store.version
            self._met.add(worker)
            if self.took_over and ahead and missing > self._lost_updates:
                more = missing - max(0, self._lost_updates)
                self._lost_updates = missing
                self._store.outrun(message.version, more)
                logger.warning("%s: %d updates of its variables are lost in all.", self._me.task, self._lost_updates)
        if scheduled:
            order = np.frombuffer(buffers[0], np.int64) if buffers else None
            self._schedule.rejoin(worker, message, order)

    def _restore(self, message: Rejoin) -> None:
        found = self._found
        state = None if found is None else _STATES.decode(found[0])
        if found is None or state is None or state.era < message.era:  # eras grow, from job to job
            what = (
                f"was killed and started again, and so was {self._copied_by}, which had the copy of its variables, "
                f"before this one had them back. Give servers hosts of their own, so that not both are lost at once."
                if self._copied_by is not None
                else "was killed and started again, and has no snapshot of this training. If its output tells of "
                "damaged ones, look for a full disk; else pass snapshot_dir or replication=2 to "
                "ParameterServerStrategy, or start the job with `phalanx run`."
            )
            raise PeerLostError(
                f"{self._me.task} {what}",
                rank=-1,
                task=str(self._me.task),
                host="",
            )
        self._store.restore(state, found[1])
        self._found = None
        self.took_over = self._must_rebuild = True
        self._schedule.await_workers()
        self._restored, self._lost_updates = state.version, -1  # even none is worth a line
        logger.warning("%s goes on from its snapshot.", self._me.task)
