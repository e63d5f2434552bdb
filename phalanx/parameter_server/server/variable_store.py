"""What one server keeps: its shards of the variables, and the optimizer that updates them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from phalanx.arrays.allocation import copy_arrays
from phalanx.cluster.compatibility import describe_difference
from phalanx.engines import make_updater
from phalanx.engines.step_layout import MergeWeight
from phalanx.engines.updater import Updater, UpdaterPiece
from phalanx.errors import CollectiveTimeoutError, DisagreementError
from phalanx.keras_compat.optimizer_slots import OptimizerSlot
from phalanx.parameter_server.server.connected_workers import CHIEF, Worker
from phalanx.parameter_server.server.embedding_tables import EmbeddingTableUpdater
from phalanx.parameter_server.server.replication import LOST, Record, ReplicaStream
from phalanx.parameter_server.server.step_schedule import POLL_S, StepSchedule
from phalanx.parameter_server.server_messages import (
    AppliedUpdate,
    AssignVariables,
    DeclareModel,
    GroupState,
    JobOver,
    PushGradients,
    SetLearningRate,
    Ticket,
    UpdateRules,
    arrays_of,
    dtypes_of,
)
from phalanx.parameter_server.shard_packing import ShardPacking, kind_of
from phalanx.parameter_server.shard_placement import PlacedVariable, Shard, shard_shape
from phalanx.parameter_server.table_rows import TableRows, weighted_sum
from phalanx.transport.frames import byte_view

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Gradient = Array | TableRows
"""Of a group of shards, or of those rows of a table that have one."""


Copies = Callable[[list[Array]], list[Array]]
"""Makes copies of arrays."""


@dataclass
class _Joint:
    """A step of synchronous training whose contributions are coming in."""

    contributions: dict[Worker, tuple[float, list[Gradient], list[Array]]] = field(default_factory=dict)
    extras: list[Array] | None = None  # merged, when it is complete
    finite: bool = True
    given_up: bool = False  # the chief has begun anew
    disagreement: str = ""  # two contributions cannot be merged, and why


class TrainedModel(NamedTuple):
    """What a worker that joins a `fit` must know of it; see `Attached`."""

    first_epoch: int
    tables: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


class _Kind(NamedTuple):
    """What the gradient of a group of shards is like: of a table, that of one row."""

    is_table: bool
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


_Key = tuple[int, int]
"""A ticket's serial and the phase of its step."""

COMPLETED = 1000
"""Merges of which it is remembered that they are over: more than any worker can be behind."""
RESULTS = 8
"""Merges whose results are kept at least for workers that ask again after their link broke; each one's newest always
is."""


_NOTHING: tuple[int, list[Array], list[Array]] = (-1, [], [])


@dataclass(frozen=True)
class _Result:
    """Of a merge that is over: whose parts are in, and the merged extras."""

    members: tuple[Worker, ...]
    extras: list[Array]


class VariableStore:
    """The shards of server number `index`. Used by one thread for each worker.

    Args:
        schedule: who is present; on the head also what is told of applied steps.
        is_head: whether this is the head.
    """

    def __init__(self, index: int, schedule: StepSchedule, names: tuple[str, ...], *, is_head: bool):
        self._index = index
        self._schedule = schedule
        self._names = names
        self._is_head = is_head
        self._changed = threading.Condition()
        self._fit = -1
        self._declared: DeclareModel | None = None
        self._shards: tuple[Shard, ...] = ()
        self._kinds: list[_Kind] = []
        self._groups = ShardPacking((), ())
        self._updater: Updater | EmbeddingTableUpdater | None = None
        self._tables: list[Array] = []
        self._joints: dict[_Key, _Joint] = {}
        self._before = _NOTHING  # of the `fit` before: its number, its last values and tables
        self._behind: set[Worker] = set()  # those that may still ask for that
        self._newest: dict[Worker, _Key] = {}  # the newest of each worker's pushes
        self._completed: dict[_Key, None] = {}  # the newest, in the order in which they were completed
        self._forgotten: _Key = (-1, -1)  # no merge up to this one is remembered
        self._results: dict[_Key, _Result] = {}
        self._last: dict[Worker, _Key] = {}  # of the newest result with each worker's part
        self._copy: ReplicaStream | None = None
        self.version = 0
        self.refused = 0
        self.late = 0

    # The start of a `fit`.

    def declare(self, message: DeclareModel, buffers: Sequence[memoryview]) -> None:
        """The chief's model: values of the shards, then those of the optimizer's variables."""
        with self._changed:
            if self._declared is not None and (message.fit, message.era) == (self._fit, self._schedule.era):
                return  # the chief asks once more after its link was lost
            self._before = (self._fit, self._values(copy_arrays), self._tables)
            self._behind = set(range(len(self._names)))
            self._build(message, message.slots, buffers)
            self._forget()
            self.version += 1
            self._schedule.begin(message.rules, message.fit, message.step, message.era)
            self._copy_state()
            self._changed.notify_all()

    def _build(self, message: DeclareModel, slots: Sequence[tuple[int, str]], buffers: Sequence[memoryview]) -> None:
        """Take these values: of the shards, then of the optimizer's variables, which `slots` name."""
        model = message.model
        self._shards = tuple(shard for shard in model.shards if shard.server == self._index)
        own = [model.variables[shard.variable] for shard in self._shards]
        values = arrays_of(buffers[: len(own)], [variable.dtype for variable in own])
        pieces = [
            UpdaterPiece(
                v.path, value.reshape(shard_shape(v, s)), model.constraints[s.variable], model.decays[s.variable]
            )
            for s, v, value in zip(self._shards, own, values, strict=True)
        ]
        tables = [number for number, shard in enumerate(self._shards) if shard.variable in model.tables]
        self._kinds, self._groups = [], ShardPacking((), ())
        self._updater, self._tables = None, []  # a server may have nothing of this model
        if pieces:
            if tables:
                self._updater = EmbeddingTableUpdater(model.optimizer, pieces, tables)
                self._tables = self._updater.tables()
            else:
                self._updater = make_updater(model.optimizer, pieces)
            state = dict(zip(slots, buffers[len(pieces) :], strict=True))
            self._updater.load_optimizer(
                [
                    _like(state[slot], value)
                    for slot, value in zip(self._updater.slots, self._updater.optimizer_values(), strict=True)
                ]
            )
            kinds = [kind_of(piece.value) for piece in pieces]
            self._groups = ShardPacking(kinds, self._updater.groups, tables)
            self._kinds = [_Kind(False, *kind) for kind in self._groups.kinds]
            self._kinds += [_Kind(True, kinds[table][0][1:], kinds[table][1]) for table in tables]
        self._fit, self._declared = message.fit, message

    def assign(self, message: AssignVariables, buffers: Sequence[memoryview]) -> None:
        """New values of some variables, between two epochs; the optimizer keeps its state."""
        with self._changed:
            declared = self._declared
            if declared is None or message.fit != self._fit:
                return
            slots, optimizer = self.optimizer_values()
            new = iter(buffers)
            values = [
                next(new) if shard.variable in message.variables else byte_view(np.ascontiguousarray(value))
                for shard, value in zip(self._shards, self._whole(), strict=True)
            ]
            self._build(declared, slots, [*values, *(byte_view(np.ascontiguousarray(each)) for each in optimizer)])
            self.version += 1
            self._copy_state()
            self._changed.notify_all()

    def _forget(self) -> None:
        """No push until now counts any more."""
        for joint in self._joints.values():
            joint.given_up = True
        self._joints.clear()
        self._completed.clear()
        self._results.clear()
        self._last.clear()
        self._newest.clear()
        self._forgotten = (-1, -1)

    def attach(
        self, worker: Worker, fit: int, variables: tuple[PlacedVariable, ...], timeout_s: float
    ) -> TrainedModel | None:
        """Wait until the chief has declared this `fit`; compare the models. None if the chief has declared another one
        since.

        Raises: DisagreementError naming the first variable that differs; PeerLostError if the chief left without.
        """
        with self._changed:
            until = self._schedule.clock() + timeout_s
            while self._fit < fit or self._declared is None:
                if self._schedule.has_chief_left:
                    raise self._schedule.lost(CHIEF, "the start of `fit`")
                if self._schedule.clock() > until:
                    raise CollectiveTimeoutError(f"{self._names[CHIEF]} did not begin `fit` within {timeout_s:g} s.")
                self._changed.wait(POLL_S)
            if fit < self._fit:
                return None
            chiefs = self._declared.model.variables
            if difference := describe_difference(chiefs, variables, "the chief", "this task"):
                raise DisagreementError(
                    f"The model is not the same on all tasks: {difference} Every task must build the same model, in "
                    f"the same order."
                )
            self._behind.discard(worker)
            if not self._behind:
                self._before = _NOTHING
            groups = () if self._updater is None else self._updater.groups
            return TrainedModel(self._declared.first_epoch, self._declared.model.tables, groups)

    # Its own end.

    @property
    def fit(self) -> int:
        """The `fit` that was declared last; -1 before the first."""
        return self._fit

    def state(self) -> tuple[GroupState, list[Array]] | None:
        """All that another process needs to go on in the place of this one; None before the first `fit`."""
        with self._changed:
            if self._declared is None:
                return None
            slots, optimizer = self.optimizer_values()
            extras = [array for result in self._results.values() for array in result.extras]
            arrays = [*self._whole(), *optimizer, *extras]
            completed = tuple((*key, result.members, len(result.extras)) for key, result in self._results.items())
            state = GroupState(
                self._declared,
                self.version,
                self._schedule.era,
                slots,
                completed,
                dtypes_of(arrays),
                self.refused,
                self._schedule.has_ended(self._fit),
                self._schedule.global_step,
            )
            return state, arrays

    def _whole(self) -> list[Array]:
        """The shards' values, in their order; they stay what they are."""
        assert self._declared is not None
        tables, values = iter(self._tables), iter(self._groups.cut(self._values(copy_arrays)))
        is_table = [shard.variable in self._declared.model.tables for shard in self._shards]
        return [next(tables).copy() if table else next(values) for table in is_table]

    def restore(self, state: GroupState, buffers: Sequence[memoryview]) -> None:
        """Go on with what `state` returned elsewhere."""
        with self._changed:
            count = sum(shard.server == self._index for shard in state.declared.model.shards) + len(state.slots)
            self._build(state.declared, state.slots, buffers[:count])
            self._forget()
            extras = iter(arrays_of(buffers[count:], state.dtypes[count:]))
            for serial, phase, members, number in state.completed:
                self._remember((serial, phase), _Result(members, [next(extras) for _ in range(number)]))
            if state.completed:  # older ones are not known any more
                self._forgotten = max((serial, phase) for serial, phase, _, _ in state.completed)
            self.version, self.refused = state.version, state.refused
            self._schedule.resume(state)
            self._changed.notify_all()

    def outrun(self, version: int, updates: int) -> None:
        """Somebody has seen this version, which is lost: the next ones must not be taken for it. The optimizer counts
        the `updates` that were lost as well: schedules go by the steps of the job, the same on all servers."""
        with self._changed:
            self.version = max(self.version, version) + 1
            if self._updater is not None and updates:
                self._updater.count(updates)

    # Its copy on another server.

    @property
    def is_copied(self) -> bool:
        """Whether another server has a copy, as far as is known."""
        with self._changed:
            if self._copy is not None and self._copy.is_lost:
                self._lose_copy()
            return self._copy is not None

    def copy_to(self, copy: ReplicaStream) -> bool:
        """Keep a copy there from now on; False if that failed."""
        with self._changed:
            self._copy = copy
            self._copy_state()
            return self._copy is not None

    def tell_copy(self, record: Record) -> None:
        """Have the copy do this as well."""
        with self._changed:
            self._send_copy(record)
            self._await_copy()

    def end_copy(self) -> None:
        """The job is over, for the copy as well."""
        with self._changed:
            self.tell_copy(JobOver())
            if self._copy is not None:
                self._copy.close()
                self._copy = None

    def follow(self, record: AppliedUpdate, buffers: Sequence[memoryview]) -> None:
        """Be the copy: apply what the leader has applied."""
        with self._changed:
            arrays = arrays_of(buffers, record.dtypes)
            if record.gradients:
                self._update(self._shaped(iter(arrays[: record.gradients])))
            result = _Result(record.members, arrays[record.gradients :])
            self._remember((record.serial, record.phase), result)
            self._schedule.global_step = record.step

    def _copy_state(self) -> None:
        """Give the copy all that it needs, if there is one and anything to give."""
        if (state := self.state()) is not None:
            self._send_copy(*state)
            self._await_copy()

    def _send_copy(self, record: Record, arrays: Sequence[Array] = ()) -> None:
        if self._copy is not None:
            try:
                self._copy.send(record, arrays)
            except LOST:
                self._lose_copy()

    def _await_copy(self) -> None:
        if self._copy is not None:
            try:
                self._copy.wait()
            except LOST:
                self._lose_copy()

    def _lose_copy(self) -> None:
        assert self._copy is not None
        logger.warning("The copy of the shards of group %d is lost; going on without one.", self._index)
        self._copy.close()
        self._copy = None

    # Values.

    def pull(self, fit: int, version: int, after: int, copy: Copies = copy_arrays) -> tuple[int, list[Array]]:
        """The version and the values of this `fit`, or none if they are of this version already.

        Args:
            after: see `Pull`; in vain if all are lost whose parts of that step could come.
            copy: see `push`.
        """
        with self._changed:
            self._await_step(after)
            if fit < self._fit:  # a worker that is late to end it
                return version, self._before[1] if fit == self._before[0] else []
            return self.version, [] if version == self.version else self._values(copy)

    def _values(self, copy: Copies) -> list[Array]:
        """The present ones, which stay what they are. None are kept here: memory that nobody looks at, an update may
        write over."""
        if self._updater is None:
            return []
        values = self._updater.values()
        return copy(values) if self._updater.lends else values

    def _await_step(self, serial: int) -> None:
        rules = self._declared.rules if self._declared is not None else None
        until = self._schedule.clock() + (0.0 if rules is None else rules.timeout_s)
        others = [worker for worker in range(len(self._names)) if worker != CHIEF]
        while max((*self._completed, self._forgotten))[0] < serial and self._schedule.clock() < until:
            if not any(map(self._schedule.is_present, others)):
                return
            self._changed.wait(POLL_S)

    def pull_rows(self, fit: int, wanted: Sequence[Array]) -> list[Array]:
        """Rows of the tables of this `fit`, by their numbers."""
        with self._changed:
            return _gather(self._tables_of(fit), wanted)

    def pull_tables(self, fit: int) -> list[Array]:
        """The tables of this `fit`, whole."""
        with self._changed:
            return [table.copy() for table in self._tables_of(fit)]

    def _tables_of(self, fit: int) -> list[Array]:
        return self._before[2] if fit < self._fit and fit == self._before[0] else self._tables

    def optimizer_values(self, *, tables: bool = True) -> tuple[tuple[OptimizerSlot, ...], list[Array]]:
        """The optimizer's variables, and what each is; without `tables` only those that belong to none."""
        with self._changed:
            if isinstance(self._updater, EmbeddingTableUpdater) and not tables:
                return self._updater.without_tables()
            return (self._updater.slots, self._updater.optimizer_values()) if self._updater else ((), [])

    def set_learning_rate(self, rate: float) -> None:
        with self._changed:
            if self._updater is not None:
                self._updater.set_learning_rate(rate)
            self.tell_copy(SetLearningRate(rate))

    # Updates.

    def push(
        self, message: PushGradients, buffers: Sequence[memoryview], copy: Copies = copy_arrays
    ) -> tuple[int, list[Array], list[Array], list[Array], str]:
        """Apply gradients, alone or with those of the others.

        Args:
            copy: copies values that would change with the next update.

        Returns: the version, the values, the rows that are wanted, the merged extras (synchronous training only), and a
            note for the log.
        """
        with self._changed:
            assert self._declared is not None, "a ticket is given after the declaration"
            rules = self._declared.rules
            if message.ticket.era != self._schedule.era:
                extras = arrays_of(buffers, message.dtypes)[len(buffers) - len(message.extras) :]
                if self._is_head and message.gradients:
                    self._schedule.confirm(message.ticket)
                return self.version, [], [], extras, "it was of a `fit` that is over, or was begun anew"
            gradients, wanted, extras = self._arrays(message, buffers)
            key = (message.ticket.serial, message.phase)
            known = self._results.get(key)
            note = ""
            if known is not None and message.ticket.member in known.members:  # the answer was lost on its way
                extras = known.extras
                if self._is_head and message.gradients:
                    self._schedule.confirm(message.ticket)
            elif rules.synchronous:
                extras, note = self._push_jointly(message, gradients, extras, rules)
            else:
                extras, result = [], _Result(message.ticket.members, [])
                note = self._apply(key, result, gradients, rules, message, finite=message.finite)
            values = self._values(copy) if message.gradients else []
            return self.version, values, self._wanted(wanted), extras, note

    def _arrays(
        self, message: PushGradients, buffers: Sequence[memoryview]
    ) -> tuple[list[Gradient], list[Array], list[Array]]:
        """The gradients in the groups' shapes and dtypes, the numbers of the rows wanted, and the extras, flat."""
        flat = iter(arrays_of(buffers, message.dtypes))
        gradients = self._shaped(flat) if message.gradients else []
        wanted = [next(flat) for _ in self._tables] if message.wants_rows else []
        return gradients, wanted, list(flat)

    def _shaped(self, flat: Iterator[Array]) -> list[Gradient]:
        """A gradient for each group, from flat arrays: one of each, of a table two, the rows' numbers and gradients."""
        gradients: list[Gradient] = []
        for is_table, shape, dtype in self._kinds:
            if is_table:
                numbers = next(flat)
                values = next(flat).astype(dtype, copy=False)
                gradients.append(TableRows(numbers, values.reshape(len(numbers), *shape)))
            else:
                gradients.append(next(flat).astype(dtype, copy=False).reshape(shape))
        return gradients

    def _wanted(self, numbers: Sequence[Array]) -> list[Array]:
        return _gather(self._tables, numbers) if numbers else []

    def _apply(
        self,
        key: _Key,
        result: _Result,
        gradients: Sequence[Gradient],
        rules: UpdateRules,
        message: PushGradients,
        *,
        finite: bool,
    ) -> str:
        """Do what a merge has come to, here and in the copy; what was wrong with it, for the log."""
        note = ""
        if rules.refuse_nan and not finite:
            self.refused += 1
            note = "it was not finite and has not been applied"
            name = self._names[message.ticket.member]
            logger.warning("An update of %s: %s (%d so far).", name, note, self.refused)
            gradients = ()
        applied = message.gradients and not note
        if self._copy is not None:  # it works while this one does
            travelling = [array for gradient in gradients for array in _arrays_of(gradient)]
            arrays, step = [*travelling, *result.extras], self._schedule.global_step + applied
            self._send_copy(AppliedUpdate(*key, result.members, len(travelling), dtypes_of(arrays), step), arrays)
        self._update(gradients)
        self._remember(key, result)
        self._await_copy()
        if self._is_head and message.gradients:
            self._schedule.done(message.ticket, applied=applied)
        return note

    def _update(self, gradients: Sequence[Gradient]) -> None:
        if gradients and self._updater is not None:
            self._updater.apply(gradients)
            self.version += 1

    def _push_jointly(
        self, message: PushGradients, gradients: list[Gradient], extras: list[Array], rules: UpdateRules
    ) -> tuple[list[Array], str]:
        """Wait for the other members' parts; the last one merges. Returns the merged extras and a note."""
        ticket, key = message.ticket, (message.ticket.serial, message.phase)
        self._newest[ticket.member] = key
        self._changed.notify_all()
        if key in self._completed or key <= self._forgotten:
            self.late += 1
            return extras, f"it came too late and was left out, as {self.late} of the workers' have been so far"
        joint = self._joints.setdefault(key, _Joint())
        joint.disagreement = joint.disagreement or self._difference(joint, ticket.member, extras)
        joint.contributions[ticket.member] = (message.share, gradients, extras)
        joint.finite &= message.finite or not message.share
        until = self._schedule.clock() + rules.timeout_s
        while joint.extras is None:
            self._schedule.check()
            if joint.given_up:
                return extras, "the chief has begun anew"
            if joint.disagreement:
                self._changed.notify_all()
                raise DisagreementError(joint.disagreement)
            if self._is_complete(key, joint, ticket, rules):
                joint.extras = self._merge(key, joint, message, rules)
                self._joints.pop(key, None)
                self._changed.notify_all()
            elif self._schedule.clock() > until:
                for member in ticket.members:
                    if member not in joint.contributions:
                        self._schedule.evict(member)
            else:
                self._changed.wait(POLL_S)
        return joint.extras, ""

    def _difference(self, joint: _Joint, member: Worker, extras: Sequence[Array]) -> str:
        """How what a member merges beside its gradients differs from what another one does; "" if it does not."""
        for other, (_, _, theirs) in joint.contributions.items():
            if [array.size for array in theirs] != [array.size for array in extras]:
                return (
                    f"{self._names[member]} merges {_described(extras)} in a step, and {self._names[other]} "
                    f"{_described(theirs)}: metrics, states of layers and what train_step returns must be the same on "
                    f"all workers."
                )
        return ""

    def _remember(self, key: _Key, result: _Result) -> None:
        self._completed[key] = None
        self._results[key] = result
        self._last |= dict.fromkeys(result.members, key)
        if len(self._results) > 2 * RESULTS:
            kept = self._last.values()
            outdated = (key for key in self._results if key not in kept)
            for old in list(islice(outdated, len(self._results) - RESULTS)):
                del self._results[old]
        if len(self._completed) > COMPLETED:
            oldest = next(iter(self._completed))
            del self._completed[oldest]
            self._forgotten = max(self._forgotten, oldest)

    def _is_complete(self, key: _Key, joint: _Joint, ticket: Ticket, rules: UpdateRules) -> bool:
        if rules.replicas_to_aggregate and len(joint.contributions) >= rules.replicas_to_aggregate:
            return True
        # One that has gone on never took this step from its own head, was too late there, or has had the answer to this
        # push from a server that is lost.
        return all(
            member in joint.contributions or self._newest.get(member, (-1, -1)) > key
            for member in ticket.members
            if self._schedule.is_present(member)
        )

    def _merge(self, key: _Key, joint: _Joint, message: PushGradients, rules: UpdateRules) -> list[Array]:
        """Apply the mean of the gradients that came; returns the merged extras."""
        parts = [joint.contributions[m] for m in message.ticket.members if m in joint.contributions]
        # Of one that was lost or late the samples are missing; what is left is the mean over the others'.
        total = sum(share for share, _, _ in parts) or 1.0
        shares = [share / total for share, _, _ in parts]
        counts = {
            MergeWeight.SHARE.value: shares,
            MergeWeight.ONE.value: [float(share > 0) for share in shares],
            MergeWeight.FIRST.value: [1.0, *[0.0] * (len(parts) - 1)],
        }
        columns = zip(*[gradients for _, gradients, _ in parts], strict=True)
        gradients = [_mean(column, shares) for column in columns]
        columns = zip(*[extras for _, _, extras in parts], strict=True)
        extras = [_weighted_sum(column, counts[weight]) for column, weight in zip(columns, message.extras, strict=True)]
        self._apply(key, _Result(tuple(joint.contributions), extras), gradients, rules, message, finite=joint.finite)
        return extras

    def notice(self) -> None:
        """Somebody came or left: those who wait look again."""
        with self._changed:
            self._changed.notify_all()


def _like(buffer: memoryview, value: Array) -> Array:
    """What a buffer holds, as an array like `value`. A count of steps has as many bytes as the sender's backend gives
    it."""
    dtype = value.dtype
    sent = len(memoryview(buffer).cast("B")) // max(value.size, 1)
    if dtype.kind == "i" and sent != dtype.itemsize:
        return np.frombuffer(buffer, f"i{sent}").reshape(value.shape).astype(dtype)
    return np.frombuffer(buffer, dtype).reshape(value.shape)


def _mean(gradients: Sequence[Gradient], weights: Sequence[float]) -> Gradient:
    rows = [gradient for gradient in gradients if isinstance(gradient, TableRows)]
    if rows:
        return weighted_sum(rows, weights)
    return _weighted_sum([gradient for gradient in gradients if not isinstance(gradient, TableRows)], weights)


def _gather(tables: Sequence[Array], wanted: Sequence[Array]) -> list[Array]:
    """Copies of rows of each table."""
    return [table[numbers] for table, numbers in zip(tables, wanted, strict=True)]


def _weighted_sum(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """The sum in the order given, in the arrays' own dtype. Arrays of weight 0 do not count, whatever is in them."""
    counted = [(array, weight) for array, weight in zip(arrays, weights, strict=True) if weight]
    if not counted:
        return np.zeros_like(arrays[0])
    first, weight = counted[0]
    result: Array = np.asarray(first * first.dtype.type(weight))  # of an array without axes NumPy makes a number
    for array, weight in counted[1:]:
        result += array * array.dtype.type(weight)
    return result


def _described(extras: Sequence[Array]) -> str:
    return f"{len(extras)} arrays of {', '.join(str(array.size) for array in extras)} values" if extras else "nothing"


def _arrays_of(gradient: Gradient) -> Sequence[Array]:
    return gradient if isinstance(gradient, TableRows) else (gradient,)
