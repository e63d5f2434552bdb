"""Recovery of a shard group whose server was lost, from snapshots and from its workers' positions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from phalanx.cluster.spec import Task
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import PeerLostError, SupersededError
from phalanx.parameter_server.server.schedule_rebuild import ScheduleRebuild
from phalanx.parameter_server.server.snapshots import Snapshots
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.variable_store import VariableStore
from phalanx.parameter_server.server_messages import DeclareModel, GroupState, Rejoin
from phalanx.parameter_server.server_protocol import Worker
from phalanx.transport.decoding import Decoder

logger = logging.getLogger(__name__)

_STATES = Decoder(GroupState)


class GroupRecovery:
    """Takes over from the process that led the group before, and keeps state for the next one.

    Args:
        me: This task.
        store: The group's variables.
        schedule: The schedule of this server.
        rebuild: Rebuilds the schedule.
        snapshots: Storage of the group's state for a process that replaces this one; None: no snapshots.
        is_head: Whether this is the head.
        replicated_by: Server that keeps a replica, if any.

    Attributes:
        took_over: Whether another process led before, during the job.
    """

    def __init__(
        self,
        me: TaskIdentity,
        store: VariableStore,
        schedule: StepSchedule,
        rebuild: ScheduleRebuild,
        snapshots: Snapshots | None,
        *,
        is_head: bool,
        replicated_by: Task | None = None,
    ):
        self._me = me
        self._store = store
        self._schedule = schedule
        self._rebuild = rebuild
        self._is_head = is_head
        self._replicated_by = replicated_by
        self._snapshots = snapshots
        # A previous process's, until it is restored.
        self._found_snapshot = None if snapshots is None else snapshots.newest()
        # Protects the decisions of `declare` and `rejoin`, and the order of snapshots. Acquired before the store's
        # lock. `become_leader` does not need it: no worker is answered before this process leads.
        self._lock = threading.Lock()
        self.took_over = False
        self._superseded: SupersededError | None = None
        self._must_rebuild = False  # whether the schedule must be rebuilt
        self._restored_version = 0  # version of the values with which this process took over
        self._lost_updates = 0  # -1: restored, and not counted yet
        self._known_workers: set[Worker] = set()  # workers whose knowledge is from this process only

    def become_leader(self) -> None:
        """Become the leader, with the present values."""
        self.took_over = self._must_rebuild = self._store.fit >= 0
        self._restored_version, self._lost_updates = self._store.version, 0
        self._known_workers.clear()
        self._rebuild.expect_workers()

    def declare(self, message: DeclareModel, buffers: Sequence[memoryview]) -> None:
        """Begin a `fit`, and write a snapshot of it."""
        with self._lock:
            self._must_rebuild = False
            self._store.declare(message, buffers)
        self.write_snapshot()

    def write_snapshots(self, seconds: float, closing: threading.Event) -> None:
        """Write a snapshot at this interval, if there are new values, until `closing`. Runs in a thread."""
        written = -1
        try:
            while not closing.wait(seconds):
                version = self._store.version
                if version != written and self.write_snapshot():
                    written = version
        except SupersededError as error:
            self._superseded = error

    def check(self) -> None:
        """Raise SupersededError if another process has replaced this one, which must then stop."""
        if self._superseded is not None:
            raise self._superseded

    def clear(self) -> None:
        """Delete the snapshots: the job is over, and no process needs them."""
        if self._snapshots is not None:
            self._snapshots.clear()

    def write_snapshot(self) -> bool:
        """Write the current state. Returns whether that succeeded."""
        with self._lock:  # one at a time, each with newer values than the previous one
            state = self._store.state()  # copies: updates continue while they are written
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

    def worker_joined_fit(self, worker: Worker) -> None:
        """Record that a worker begins a `fit` here: from now on, all its knowledge is from this process."""
        self._known_workers.add(worker)

    def rejoin(self, worker: Worker, message: Rejoin, buffers: Sequence[memoryview]) -> None:
        """Readmit a worker that has lost its link to this task during a `fit`, perhaps because this process is new."""
        with self._lock:
            if self._store.fit < message.fit:
                self._restore(message)
            has_schedule = self._is_head and message.epoch >= 0 and message.era == self._schedule.fit.era
            if self._must_rebuild and has_schedule:
                self._must_rebuild = False
                if not self._schedule.fit.has_ended(message.fit):
                    self._rebuild.start()
            missing = max(0, message.version - self._restored_version)
            # A worker that was only cut off from the network has seen nothing that this process has not. Others may
            # return late, when as many new updates were made as had been lost.
            is_ahead = (
                self._lost_updates < 0 or worker not in self._known_workers or message.version > self._store.version
            )
            self._known_workers.add(worker)
            if self.took_over and is_ahead and missing > self._lost_updates:
                more = missing - max(0, self._lost_updates)
                self._lost_updates = missing
                self._store.skip_versions(message.version, more)
                logger.warning("%s: %d updates of its variables are lost in all.", self._me.task, self._lost_updates)
        if has_schedule:
            order = np.frombuffer(buffers[0], np.int64) if buffers else None
            self._rebuild.rejoin(worker, message, order)

    def _restore(self, message: Rejoin) -> None:
        found = self._found_snapshot
        state = None if found is None else _STATES.decode(found[0])
        if found is None or state is None or state.era < message.era:  # eras grow from job to job
            what = (
                f"was killed and started again, and so was {self._replicated_by}, which had the copy of its variables, "
                f"before this one had them back. Give servers hosts of their own, so that not both are lost at once."
                if self._replicated_by is not None
                else "was killed and started again, and has no snapshot of this training. If its output names "
                "damaged ones, look for a full disk; else pass snapshot_dir or replication=2 to "
                "ParameterServerStrategy, or start the job with `phalanx run`."
            )
            raise PeerLostError(f"{self._me.task} {what}", rank=-1, task=str(self._me.task), host="")
        self._store.restore(state, found[1])
        self._found_snapshot = None
        self.took_over = self._must_rebuild = True
        self._rebuild.expect_workers()
        self._restored_version, self._lost_updates = state.version, -1  # even 0 lost updates are logged
        logger.warning("%s resumes from its snapshot.", self._me.task)
