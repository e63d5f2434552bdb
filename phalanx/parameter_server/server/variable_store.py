"""The shards of one server, and the updates that workers push to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from phalanx.arrays.allocation import copy_arrays
from phalanx.cluster.task_comparison import describe_difference
from phalanx.errors import CollectiveTimeoutError, DisagreementError, LinkClosedError
from phalanx.parameter_server import server_messages as messages
from phalanx.parameter_server.server.declared_shards import CopyArrays, DeclaredShards, Gradient, gather_rows
from phalanx.parameter_server.server.merge_barrier import Contribution, MergeBarrier, MergedStep
from phalanx.parameter_server.server.merge_history import MergeHistory, MergeKey, MergeResult
from phalanx.parameter_server.server.replication import ReplicaStream, State
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.worker_membership import POLL_S
from phalanx.parameter_server.server_messages import GroupState, PushGradients, Slots, arrays_of, dtypes_of
from phalanx.parameter_server.server_protocol import CHIEF_WORKER, Worker
from phalanx.parameter_server.shard_placement import PlacedVariable
from phalanx.parameter_server.table_rows import TableRows

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


class JoinedFitState(NamedTuple):
    """State that a worker needs to join a `fit`; see `FitJoined`."""

    first_epoch: int
    tables: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    step_offset: int


class PushResult(NamedTuple):
    """Response to gradients.

    Attributes:
        version: Version of the values.
        values: Values of the shard groups.
        rows: The requested rows of tables.
        extras: The merged extras; only in synchronous training.
        note: Text for the worker's log, or empty.
    """

    version: int
    values: list[Array]
    rows: list[Array]
    extras: list[Array]
    note: str


@dataclass
class _PreviousFit:
    """Last values of the previous `fit`, for workers that have not joined the next one yet."""

    number: int = -1
    values: list[Array] = field(default_factory=list)
    tables: list[Array] = field(default_factory=list)
    workers_behind: set[Worker] = field(default_factory=set)


class VariableStore:
    """The shards of one server. Each worker's thread uses it.

    The lock `changed` protects all attributes. It is held while the backend applies an update, so updates are applied
    one after the other. It is acquired before the schedule's lock, never after it.

    Args:
        index: Number of the server.
        schedule: The schedule of this server; on the head, it is notified of applied steps.
        is_head: Whether this is the head.
        is_leading: Returns whether this server leads the group, as far as it knows.

    Attributes:
        replica: Replica of the shards on another server.
        version: Version of the values; grows with every update.
    """

    def __init__(
        self, index: int, schedule: StepSchedule, *, is_head: bool, is_leading: Callable[[], bool] = lambda: True
    ):
        self._index = index
        self._schedule = schedule
        self._members = schedule.members
        self._is_head = is_head
        self._is_leading = is_leading
        self.changed = threading.Condition()
        self._shards: DeclaredShards | None = None
        self._previous_fit = _PreviousFit()
        self.history = MergeHistory()
        self._barrier = MergeBarrier(schedule.members, self.changed)
        self.replica = ReplicaStream(index, self.changed)
        self.version = 0
        self._refused = 0  # updates that were not finite

    # The start of a `fit`.

    @property
    def fit(self) -> int:
        """Number of the latest declared `fit`; -1 before the first."""
        return -1 if self._shards is None else self._shards.declared.fit

    def declare(self, message: messages.DeclareModel, buffers: Sequence[memoryview]) -> None:
        """Store the chief's model, with the values of the shards and of the optimizer's variables."""
        with self.changed:
            if (message.fit, message.era) == (self.fit, self._schedule.fit.era):
                return  # a repeated request, after the chief's link was lost
            if (previous := self._shards) is not None:
                workers = set(range(len(self._members.names)))
                self._previous_fit = _PreviousFit(self.fit, previous.values(copy_arrays), previous.tables, workers)
            self._shards = DeclaredShards(self._index, message, message.slots, buffers)
            self._barrier.abandon()
            self.history = MergeHistory()
            self.version += 1  # workers pull by version, and these values are new
            self._schedule.begin_fit(message.rules, message.fit, message.step, message.era)
            self.replica.send_state(self.state())  # after `begin_fit`: the state names the era
            self.changed.notify_all()

    def assign(self, message: messages.AssignVariables, buffers: Sequence[memoryview]) -> None:
        """Set new values of some variables, between two epochs; the optimizer keeps its state."""
        with self.changed:
            if self._shards is None or message.fit != self.fit:
                return
            self._shards = self._shards.with_values(self._index, message.variables, buffers)
            self.version += 1
            self.replica.send_state(self.state())
            self.changed.notify_all()

    def join(
        self, worker: Worker, fit: int, variables: tuple[PlacedVariable, ...], timeout_s: float
    ) -> JoinedFitState | None:
        """Wait until the chief has declared this `fit`, and compare the models; None if it has declared a later one.

        Raises:
            DisagreementError: names the first variable that differs.
            PeerLostError: the chief has left without declaring it.
            CollectiveTimeoutError: the chief does not declare it in time.
        """
        members = self._members
        with self.changed:
            until = members.clock() + timeout_s
            while self._shards is None or self.fit < fit:
                if members.has_chief_left:
                    raise members.table.lost_error(CHIEF_WORKER, "the start of `fit`")
                if members.clock() > until:
                    raise CollectiveTimeoutError(
                        f"{members.names[CHIEF_WORKER]} did not begin `fit` within {timeout_s:g} s."
                    )
                self.changed.wait(POLL_S)
            declared = self._shards.declared
            if fit < declared.fit:
                return None
            if difference := describe_difference(declared.model.variables, variables, "the chief", "this task"):
                raise DisagreementError(
                    f"The model is not the same on all tasks: {difference} Every task must build the same model, in "
                    f"the same order."
                )
            self._previous_fit.workers_behind.discard(worker)
            if not self._previous_fit.workers_behind:
                self._previous_fit = _PreviousFit()
            return JoinedFitState(
                declared.first_epoch, declared.model.tables, self._shards.groups, declared.step_offset
            )

    # State for snapshots and replicas.

    def state(self) -> State | None:
        """State that another process needs to take over from this one; None before the first `fit`."""
        with self.changed:
            if self._shards is None:
                return None
            slots, optimizer = self._shards.optimizer_values()
            completed, extras = self.history.state()
            arrays = [*self._shards.values_by_shard(), *optimizer, *extras]
            state = GroupState(
                declared=self._shards.declared,
                version=self.version,
                era=self._schedule.fit.era,
                slots=slots,
                completed=completed,
                dtypes=dtypes_of(arrays),
                refused=self._refused,
                ended=self._schedule.fit.has_ended(self.fit),
                step=self._schedule.global_step,
            )
            return state, arrays

    def restore(self, state: GroupState, buffers: Sequence[memoryview]) -> None:
        """Continue from the `state` of another process."""
        with self.changed:
            count = sum(shard.server == self._index for shard in state.declared.model.shards) + len(state.slots)
            self._shards = DeclaredShards(self._index, state.declared, state.slots, buffers[:count])
            self._barrier.abandon()
            # Also the responses to pushes that the values contain: a push that a worker repeats must not count twice.
            self.history = MergeHistory.from_state(state.completed, arrays_of(buffers[count:], state.dtypes[count:]))
            self.version, self._refused = state.version, state.refused
            self._schedule.resume_fit(state)
            self.changed.notify_all()

    def apply_replicated(self, record: messages.AppliedUpdate, buffers: Sequence[memoryview]) -> None:
        """On the replica, apply what the leader has applied."""
        with self.changed:
            assert self._shards is not None, "the leader sends its state first"
            # Gradients, not results: the same optimizer makes the same update here, and results would be three times as
            # many bytes with Adam's moments.
            arrays = arrays_of(buffers, record.dtypes)
            if record.num_gradients:
                gradients = self._shards.shape_gradients(iter(arrays[: record.num_gradients]))
                self.version += self._shards.apply(gradients)
            result = MergeResult(record.members, arrays[record.num_gradients :])
            self.history.record((record.serial, record.phase), result)
            with self._schedule.changed:
                self._schedule.global_step = record.step
                self._schedule.fit.skip_serial(record.serial)

    def skip_versions(self, version: int, updates: int) -> None:
        """Skip a lost version that a worker has seen, so that later ones are not mistaken for it.

        The optimizer counts the `updates` that were lost.
        """
        with self.changed:
            self.version = max(self.version, version) + 1
            if self._shards is not None:
                self._shards.count_updates(updates)

    # Values.

    def pull(self, fit: int, version: int, after: int, copy: CopyArrays = copy_arrays) -> tuple[int, list[Array]]:
        """The version and the values of this `fit`; no values if the worker already has this version.

        Args:
            fit: Number of the `fit` call.
            version: Version of the values that the worker has.
            after: Serial of the step to wait for (see `PullValues`).
            copy: Copies values that the next update would change.
        """
        with self.changed:
            self._wait_for_step(after)
            if fit < self.fit:  # the worker is late to finish the previous one
                return version, self._previous_fit.values if fit == self._previous_fit.number else []
            if self._shards is None or version == self.version:
                return self.version, []
            return self.version, self._shards.values(copy)

    def _wait_for_step(self, serial: int) -> None:
        """Wait for a step, if there is one, unless all workers that could send a part of it are lost."""
        if serial < 0:
            return
        timeout_s = 0.0 if self._shards is None else self._shards.declared.rules.timeout_s
        until = self._members.clock() + timeout_s
        others = range(1, len(self._members.names))
        while self.history.newest_serial() < serial and self._members.clock() < until:
            if not any(map(self._members.table.is_present, others)):
                return
            self.changed.wait(POLL_S)

    def pull_rows(self, fit: int, numbers: Sequence[Array]) -> list[Array]:
        """The given rows of the tables of this `fit`."""
        with self.changed:
            return gather_rows(self._tables_of(fit), numbers)

    def pull_tables(self, fit: int) -> list[Array]:
        """Copies of the tables of this `fit`."""
        with self.changed:
            return [table.copy() for table in self._tables_of(fit)]

    def _tables_of(self, fit: int) -> list[Array]:
        if fit < self.fit and fit == self._previous_fit.number:
            return self._previous_fit.tables
        return [] if self._shards is None else self._shards.tables

    def pull_optimizer(self, *, tables: bool) -> tuple[Slots, list[Array]]:
        """Names and values of the optimizer's variables; without `tables`, only of those that belong to no table."""
        with self.changed:
            return ((), []) if self._shards is None else self._shards.optimizer_values(tables=tables)

    # Updates.

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate."""
        with self.changed:
            if self._shards is not None:
                self._shards.set_learning_rate(rate)
            self.replica.replicate(messages.SetLearningRate(rate))

    def push(self, message: PushGradients, buffers: Sequence[memoryview], copy: CopyArrays = copy_arrays) -> PushResult:
        """Apply gradients, alone or merged with those of the other members of the step.

        Args:
            message: The request.
            buffers: Its arrays.
            copy: Copies values that the next update would change.

        Raises: LinkClosedError if this server no longer leads.
        """
        with self.changed:
            # While this thread waited for the lock, another server may have taken the lead and sent its values.
            if not self._is_leading():
                raise LinkClosedError("another server leads this group of shards now.")
            shards = self._shards
            assert shards is not None, "a ticket is issued after the declaration"
            rules, ticket = shards.declared.rules, message.ticket
            # The era, not the number: a restarted chief declares the same `fit` again, with different values.
            if ticket.era != self._schedule.fit.era:
                extras = arrays_of(buffers, message.dtypes)[len(buffers) - len(message.extras) :]
                self._settle_counted_step(message)
                return PushResult(
                    self.version,
                    [],
                    [],
                    extras,
                    "it belongs to a `fit` that is over, or that the chief has declared again",
                )
            flat = iter(arrays_of(buffers, message.dtypes))
            gradients = shards.shape_gradients(flat) if message.has_gradients else []
            wanted = [next(flat) for _ in shards.tables] if message.wants_rows else []
            extras, note = list(flat), ""
            key = (ticket.serial, message.phase)
            known = self.history.result_for(key, ticket.member)
            if known is not None:  # the response was lost
                extras = known.extras
                self._settle_counted_step(message)
            elif rules.synchronous:
                part = Contribution(message.share, gradients, extras)
                extras, note = self._barrier.push(
                    message, part, rules, self.history, lambda merged: self._apply(key, merged, message)
                )
            else:
                note = self._apply(key, MergedStep(ticket.members, gradients, [], message.is_finite), message)
                extras = []
            # Another thread may have changed the shards while this one waited at the barrier.
            shards = self._shards or shards
            values = shards.values(copy) if message.has_gradients else []
            rows = gather_rows(shards.tables, wanted) if wanted else []
            return PushResult(self.version, values, rows, extras, note)

    def _settle_counted_step(self, message: PushGradients) -> None:
        if self._is_head and message.has_gradients:
            self._schedule.settle_counted_step(message.ticket)

    def _apply(self, key: MergeKey, merged: MergedStep, message: PushGradients) -> str:
        """Apply a merge here and on the replica. Returns what was wrong with it, for the log."""
        shards = self._shards
        assert shards is not None, "a ticket is issued after the declaration"
        gradients, note = merged.gradients, ""
        if shards.declared.rules.refuse_nan and not merged.is_finite:
            self._refused += 1
            note = "it was not finite and has not been applied"
            name = self._members.names[message.ticket.member]
            logger.warning("An update of %s: %s (%d so far).", name, note, self._refused)
            gradients = []
        is_applied = message.has_gradients and not note
        if self.replica.has_link:  # the replica works while this server does
            sent = [array for gradient in gradients for array in _arrays_of(gradient)]
            arrays, step = [*sent, *merged.extras], self._schedule.global_step + is_applied
            self.replica.send(messages.AppliedUpdate(*key, merged.members, len(sent), dtypes_of(arrays), step), arrays)
        self.version += shards.apply(gradients)
        self.history.record(key, MergeResult(merged.members, merged.extras))
        self.replica.wait()  # with the lock held: workers get a response only when both servers have the update
        if self._is_head and message.has_gradients:
            self._schedule.complete_step(message.ticket, is_applied=is_applied)
        return note

    def wake(self) -> None:
        """Wake waiting threads to check again, after a worker has connected or left."""
        with self.changed:
            self.changed.notify_all()


def _arrays_of(gradient: Gradient) -> Sequence[Array]:
    return gradient if isinstance(gradient, TableRows) else (gradient,)
