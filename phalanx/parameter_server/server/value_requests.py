"""Requests about the variables of a shard group: declarations, values and updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.config.job_config import JobConfig
from phalanx.parameter_server import server_messages as messages
from phalanx.parameter_server.server.declared_shards import CopyArrays
from phalanx.parameter_server.server.group_recovery import GroupRecovery
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.variable_store import VariableStore
from phalanx.parameter_server.server_messages import FitJoined, FitOver, Response, Values, arrays_of, dtypes_of
from phalanx.parameter_server.server_protocol import Worker
from phalanx.parameter_server.table_rows import NUMBER

Array = np.ndarray[Any, Any]
Reply = tuple[Response, Sequence[Array]] | None
"""A response and its arrays; None: `Acknowledged`."""


class Sender(NamedTuple):
    """Where a request comes from.

    Attributes:
        worker: number of the worker.
        link: name of its link.
        buffers: arrays of the request.
        copy: copies values to where they are sent from.
    """

    worker: Worker
    link: str
    buffers: Sequence[memoryview]
    copy: CopyArrays


class ValueRequests:
    """Each method handles one kind of request.

    Args:
        config: of the job.
        store: the group's variables.
        schedule: the schedule of this server.
        recovery: what is kept for a process that replaces this one.
        is_head: whether this is the head.
        is_replicated: whether there should be a replica of the shards on another server.
        confirm_update: called after an update that the replica lacks; returns once the chief knows that it does.
    """

    def __init__(
        self,
        config: JobConfig,
        store: VariableStore,
        schedule: StepSchedule,
        recovery: GroupRecovery,
        *,
        is_head: bool,
        is_replicated: bool,
        confirm_update: Callable[[], None],
    ):
        self._config = config
        self._store = store
        self._schedule = schedule
        self._recovery = recovery
        self._is_head = is_head
        self._is_replicated = is_replicated
        self._confirm_update = confirm_update

    def declare(self, sender: Sender, request: messages.DeclareModel) -> None:
        self._recovery.declare(request, sender.buffers)

    def join(self, sender: Sender, request: messages.JoinFit) -> Reply:
        # Between two fits the chief may be busy for long; at the first it must be there in time.
        start_s = self._config.rendezvous_timeout_s
        timeout_s = max(start_s, self._config.timeout_s) if request.fit else start_s
        joined = self._store.join(sender.worker, request.fit, request.variables, timeout_s)
        self._recovery.worker_joined_fit(sender.worker)
        if joined is None:
            return FitOver(), ()
        return FitJoined(self._schedule.fit.era, step=self._schedule.global_step, **joined._asdict()), ()

    def rejoin(self, sender: Sender, request: messages.Rejoin) -> None:
        self._recovery.rejoin(sender.worker, request, sender.buffers)

    def push(self, sender: Sender, request: messages.PushGradients) -> Reply:
        version, values, rows, extras, note = self._store.push(request, sender.buffers, sender.copy)
        # Not checked where there is no replica: the other workers' updates hold the store's lock.
        is_unreplicated = self._is_replicated and not self._store.replica.is_attached
        if is_unreplicated:
            self._confirm_update()  # the replica may lead by now, and have been lost for that reason
        ticket = None
        if self._is_head and request.gradients:
            now = request.ticket
            ticket = self._schedule.try_next_ticket(sender.worker, sender.link, now.fit, now.epoch, now.era)
        arrays = [*values, *rows, *extras]
        answer = Values(
            version,
            self._schedule.global_step,
            dtypes_of(arrays),
            len(values),
            note,
            ticket=ticket,
            is_unreplicated=is_unreplicated,
            rows=len(rows),
        )
        return answer, arrays

    def pull(self, sender: Sender, request: messages.PullValues) -> Reply:
        version, values = self._store.pull(request.fit, request.version, request.after, sender.copy)
        return Values(version, self._schedule.global_step, dtypes_of(values), len(values)), values

    def pull_rows(self, sender: Sender, request: messages.PullRows) -> Reply:
        numbers = arrays_of(sender.buffers, [NUMBER.name] * len(sender.buffers))
        return self._rows_reply(self._store.pull_rows(request.fit, numbers))

    def pull_tables(self, sender: Sender, request: messages.PullTables) -> Reply:
        return self._rows_reply(self._store.pull_tables(request.fit))

    def _rows_reply(self, rows: list[Array]) -> Reply:
        return Values(self._store.version, dtypes=dtypes_of(rows), rows=len(rows)), rows

    def pull_optimizer(self, sender: Sender, request: messages.PullOptimizer) -> Reply:
        slots, state = self._store.pull_optimizer(tables=request.tables)
        return Values(self._store.version, dtypes=dtypes_of(state), slots=slots), state

    def set_learning_rate(self, sender: Sender, request: messages.SetLearningRate) -> None:
        self._store.set_learning_rate(request.learning_rate)

    def assign(self, sender: Sender, request: messages.AssignVariables) -> None:
        self._store.assign(request, sender.buffers)
