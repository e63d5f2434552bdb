"""Handlers of each kind of request: about the variables of a group of shards, and, on the head, about the schedule and
the chief's broadcasts to the other workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.config.job_config import JobConfig
from phalanx.parameter_server import server_messages as messages
from phalanx.parameter_server.server.chief_broadcasts import ChiefBroadcasts
from phalanx.parameter_server.server.declared_shards import CopyArrays
from phalanx.parameter_server.server.epoch_validation import EpochValidation
from phalanx.parameter_server.server.group_recovery import GroupRecovery
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.variable_store import VariableStore
from phalanx.parameter_server.server_messages import (
    Acknowledged,
    Decision,
    EpochOver,
    FitOver,
    Values,
    arrays_of,
    dtypes_of,
)
from phalanx.parameter_server.server_protocol import Worker
from phalanx.parameter_server.table_rows import ROW_NUMBER_DTYPE

Array = np.ndarray[Any, Any]
Reply = tuple[messages.Response, Sequence[Array]] | None
"""A response and its arrays; None: `Acknowledged`."""


class RequestContext(NamedTuple):
    """Origin of a request.

    Attributes:
        worker: Number of the worker.
        link: Name of its link.
        buffers: Arrays of the request.
        copy: Copies values to the memory that they are sent from.
    """

    worker: Worker
    link: str
    buffers: Sequence[memoryview]
    copy: CopyArrays


Handler = Callable[[RequestContext, Any], Reply]


class GroupRequests:
    """The handlers of the requests to one group of shards.

    Args:
        config: Configuration of the job.
        store: The group's variables.
        schedule: The schedule of this server.
        recovery: State kept for a process that replaces this one.
        broadcasts: Broadcasts of the chief to the other workers.
        is_head: Whether this is the head.
        confirm_update: Called after an update that the replica lacks; returns once the chief knows that it lacks it.
            None if there is to be no replica.
    """

    def __init__(
        self,
        config: JobConfig,
        store: VariableStore,
        schedule: StepSchedule,
        recovery: GroupRecovery,
        broadcasts: ChiefBroadcasts,
        *,
        is_head: bool,
        confirm_update: Callable[[], None] | None,
    ):
        self._config = config
        self._store = store
        self._schedule = schedule
        self._recovery = recovery
        self._broadcasts = broadcasts
        self._is_head = is_head
        self._confirm_update = confirm_update

    def handlers(self) -> dict[type, Handler]:
        """The handler of each kind of request, except connection requests."""
        store, schedule, recovery = self._store, self._schedule, self._recovery
        members, validation = schedule.members, EpochValidation(schedule)
        return {
            messages.DeclareModel: lambda context, request: recovery.declare(request, context.buffers),
            messages.JoinFit: self._join,
            messages.Rejoin: lambda context, request: recovery.rejoin(context.worker, request, context.buffers),
            messages.PushGradients: self._push,
            messages.PullValues: self._pull,
            messages.PullRows: self._pull_rows,
            messages.PullTables: lambda context, request: self._rows_reply(store.pull_tables(request.fit)),
            messages.PullOptimizer: self._pull_optimizer,
            messages.SetLearningRate: lambda context, request: store.set_learning_rate(request.learning_rate),
            messages.AssignVariables: lambda context, request: store.assign(request, context.buffers),
            messages.OpenEpoch: self._open_epoch,
            messages.RequestTicket: self._next_ticket,
            messages.NoBatch: lambda context, request: schedule.report_no_batch(
                request.ticket, is_end_of_data=request.is_end_of_data
            ),
            messages.EndEpoch: self._end_epoch,
            messages.RequestSampleOrder: self._sample_order,
            messages.ValidationLogs: lambda context, request: validation.store(request, context.buffers),
            messages.RequestValidationLogs: lambda context, request: validation.wait(request, self._config.timeout_s),
            messages.EpochReport: self._add_report,
            messages.CollectReports: self._collect_reports,
            messages.HoldSteps: self._hold_steps,
            messages.RequestStop: self._request_stop,
            messages.EndFit: self._end_fit,
            messages.ChiefAlive: lambda context, request: members.record_chief_heartbeat(),
            messages.QueryJobOver: lambda context, request: (Decision(members.has_chief_left), ()),
            messages.Broadcast: self._broadcast,
            messages.RequestBroadcast: self._wait_for_broadcast,
        }

    # The variables.

    def _join(self, context: RequestContext, request: messages.JoinFit) -> Reply:
        # Between two fits the chief may be busy for long; at the first one it must connect in time.
        start_timeout_s = self._config.rendezvous_timeout_s
        timeout_s = max(start_timeout_s, self._config.timeout_s) if request.fit else start_timeout_s
        joined = self._store.join(context.worker, request.fit, request.variables, timeout_s)
        self._recovery.worker_joined_fit(context.worker)
        if joined is None:
            return FitOver(), ()
        answer = messages.FitJoined(self._schedule.fit.era, **self._step_count(), **joined._asdict())
        return answer, ()

    def _push(self, context: RequestContext, request: messages.PushGradients) -> Reply:
        version, values, rows, extras, note = self._store.push(request, context.buffers, context.copy)
        # Not checked without a replica: the other workers' updates hold the store's lock.
        is_unreplicated = self._confirm_update is not None and not self._store.replica.is_attached
        if self._confirm_update is not None and is_unreplicated:
            self._confirm_update()  # the replica may already lead, and be lost to this server for that reason
        ticket = None
        if self._is_head and request.has_gradients:
            now = request.ticket
            ticket = self._schedule.try_next_ticket(context.worker, context.link, now.fit, now.epoch, now.era)
        arrays = [*values, *rows, *extras]
        answer = Values(
            version,
            dtypes=dtypes_of(arrays),
            shards=len(values),
            note=note,
            ticket=ticket,
            is_unreplicated=is_unreplicated,
            rows=len(rows),
            **self._step_count(),
        )
        return answer, arrays

    def _pull(self, context: RequestContext, request: messages.PullValues) -> Reply:
        version, values = self._store.pull(request.fit, request.version, request.after, context.copy)
        return Values(version, dtypes=dtypes_of(values), shards=len(values), **self._step_count()), values

    def _pull_rows(self, context: RequestContext, request: messages.PullRows) -> Reply:
        numbers = arrays_of(context.buffers, [ROW_NUMBER_DTYPE.name] * len(context.buffers))
        return self._rows_reply(self._store.pull_rows(request.fit, numbers))

    def _rows_reply(self, rows: list[Array]) -> Reply:
        return Values(self._store.version, dtypes=dtypes_of(rows), rows=len(rows)), rows

    def _pull_optimizer(self, context: RequestContext, request: messages.PullOptimizer) -> Reply:
        slots, state = self._store.pull_optimizer(tables=request.tables)
        return Values(self._store.version, dtypes=dtypes_of(state), slots=slots), state

    # The schedule.

    def _open_epoch(self, context: RequestContext, request: messages.OpenEpoch) -> None:
        order = np.frombuffer(context.buffers[0], np.int64) if context.buffers else None
        steps = None if request.steps < 0 else request.steps
        self._schedule.open_epoch(request.fit, request.epoch, steps, order)

    def _next_ticket(self, context: RequestContext, request: messages.RequestTicket) -> Reply:
        where = (context.worker, context.link, request.fit, request.epoch, request.era)
        if request.wait:
            return self._schedule.next_ticket(*where, self._config.timeout_s), ()
        return self._schedule.try_next_ticket(*where) or Acknowledged(), ()

    def _end_epoch(self, context: RequestContext, request: messages.EndEpoch) -> Reply:
        return EpochOver(self._schedule.end_epoch(request.fit, request.epoch)), ()

    def _sample_order(self, context: RequestContext, request: messages.RequestSampleOrder) -> Reply:
        found = self._schedule.wait_for_order(request.fit, request.epoch, request.era, self._config.timeout_s)
        return (Values(0), [found]) if isinstance(found, np.ndarray) else (found, ())

    def _add_report(self, context: RequestContext, request: messages.EpochReport) -> None:
        self._schedule.add_report(context.worker, request, arrays_of(context.buffers, request.dtypes))

    def _collect_reports(self, context: RequestContext, request: messages.CollectReports) -> Reply:
        merged = self._schedule.collect_reports(self._config.timeout_s)
        fit = self._schedule.fit
        note = "; ".join(filter(None, [fit.lost.describe(), fit.reports.describe_lost()]))
        return Values(0, dtypes=dtypes_of(merged), note=note, **self._step_count()), merged

    def _hold_steps(self, context: RequestContext, request: messages.HoldSteps) -> Reply:
        if request.is_held:
            self._schedule.hold_steps(self._config.timeout_s)
        else:
            self._schedule.resume_steps()
        return Values(0, **self._step_count()), ()

    def _request_stop(self, context: RequestContext, request: messages.RequestStop) -> Reply:
        fit = self._schedule.fit
        if request.fit != fit.number:
            return Decision(answer=False), ()
        fit.stop_requested |= request.stop
        return Decision(fit.stop_requested), ()

    def _end_fit(self, context: RequestContext, request: messages.EndFit) -> None:
        # Before the response: a successor unaware of the end would wait for positions that no worker sends.
        self._schedule.end_fit(request.fit)
        self._store.replica.replicate(request)
        self._recovery.write_snapshot()

    # Broadcasts of the chief.

    def _broadcast(self, context: RequestContext, request: messages.Broadcast) -> Reply:
        arrays = [np.frombuffer(bytes(buffer), np.uint8) for buffer in context.buffers]
        holds = self._broadcasts.broadcast(request.subject, request.fit, arrays, keep_first=request.keep_first)
        return (Values(0), holds) if request.keep_first else None

    def _wait_for_broadcast(self, context: RequestContext, request: messages.RequestBroadcast) -> Reply:
        arrays = self._broadcasts.wait_for_broadcast(request.subject, request.fit)
        return (FitOver(), ()) if arrays is None else (Values(0), arrays)

    def _step_count(self) -> dict[str, Any]:
        """The global step, and the steps included in it, for `Values` and `FitJoined`."""
        with self._schedule.changed:  # both from the same moment
            return {"step": self._schedule.global_step, "counted_serials": self._schedule.counted.serials()}
