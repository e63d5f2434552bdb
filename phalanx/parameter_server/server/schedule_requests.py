"""Requests to the head about the schedule, and about what the chief announces to the other workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.parameter_server import server_messages as messages
from phalanx.parameter_server.server.chief_announcements import ChiefAnnouncements
from phalanx.parameter_server.server.group_recovery import GroupRecovery
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.value_requests import Reply, Sender
from phalanx.parameter_server.server.variable_store import VariableStore
from phalanx.parameter_server.server_messages import Acknowledged, EpochOver, FitOver, Values, arrays_of, dtypes_of

Array = np.ndarray[Any, Any]


def _yes_or_no(answer: bool) -> Reply:
    return FitOver() if answer else Acknowledged(), ()


class ScheduleRequests:
    """Each method handles one kind of request.

    Args:
        timeout_s: seconds to wait for a connected worker.
        schedule: the schedule of this server.
        announcements: what the chief announces to the other workers.
        store: the group's variables.
        recovery: what is kept for a process that replaces this one.
    """

    def __init__(
        self,
        timeout_s: float,
        schedule: StepSchedule,
        announcements: ChiefAnnouncements,
        store: VariableStore,
        recovery: GroupRecovery,
    ):
        self._timeout_s = timeout_s
        self._schedule = schedule
        self._announcements = announcements
        self._store = store
        self._recovery = recovery

    def open_epoch(self, sender: Sender, request: messages.OpenEpoch) -> None:
        order = np.frombuffer(sender.buffers[0], np.int64) if sender.buffers else None
        steps = None if request.steps < 0 else request.steps
        self._schedule.open_epoch(request.fit, request.epoch, steps, order)

    def next_ticket(self, sender: Sender, request: messages.RequestTicket) -> Reply:
        where = (sender.worker, sender.link, request.fit, request.epoch, request.era)
        if request.wait:
            return self._schedule.next_ticket(*where, self._timeout_s), ()
        return self._schedule.try_next_ticket(*where) or Acknowledged(), ()

    def no_batch(self, sender: Sender, request: messages.NoBatch) -> None:
        self._schedule.report_no_batch(request.ticket, ends=request.ends)

    def end_epoch(self, sender: Sender, request: messages.EndEpoch) -> Reply:
        return EpochOver(self._schedule.end_epoch(request.fit, request.epoch)), ()

    def sample_order(self, sender: Sender, request: messages.RequestSampleOrder) -> Reply:
        found = self._schedule.wait_for_order(request.fit, request.epoch, request.era, self._timeout_s)
        return (Values(0), [found]) if isinstance(found, np.ndarray) else (found, ())

    def report(self, sender: Sender, request: messages.EpochReport) -> None:
        self._schedule.add_report(sender.worker, request, arrays_of(sender.buffers, request.dtypes))

    def collect_reports(self, sender: Sender, request: messages.CollectReports) -> Reply:
        merged = self._schedule.collect_reports(self._timeout_s)
        note = self._schedule.fit.lost.describe()
        return Values(0, self._schedule.global_step, dtypes_of(merged), note=note), merged

    def hold_steps(self, sender: Sender, request: messages.HoldSteps) -> Reply:
        if request.on:
            self._schedule.hold_steps(self._timeout_s)
        else:
            self._schedule.resume_steps()
        return Values(0, self._schedule.global_step), ()

    def request_stop(self, sender: Sender, request: messages.RequestStop) -> Reply:
        fit = self._schedule.fit
        if request.fit != fit.number:
            return _yes_or_no(False)
        fit.stop_requested |= request.stop
        return _yes_or_no(fit.stop_requested)

    def end_fit(self, sender: Sender, request: messages.EndFit) -> None:
        self._schedule.end_fit(request.fit)
        self._store.replica.replicate(request)
        self._recovery.write_snapshot()

    def chief_alive(self, sender: Sender, request: messages.ChiefAlive) -> None:
        self._schedule.members.chief_is_alive()

    def is_job_over(self, sender: Sender, request: messages.QueryJobOver) -> Reply:
        return _yes_or_no(self._schedule.members.has_chief_left)

    def begin_session(self, sender: Sender, request: messages.BeginSession) -> None:
        self._announcements.begin_session(sender.worker, request.session)

    def broadcast(self, sender: Sender, request: messages.Broadcast) -> Reply:
        arrays = [np.frombuffer(bytes(buffer), np.uint8) for buffer in sender.buffers]
        holds = self._announcements.broadcast(request.subject, request.fit, arrays, keep_first=request.keep_first)
        return (Values(0), holds) if request.keep_first else None

    def wait_for_broadcast(self, sender: Sender, request: messages.RequestBroadcast) -> Reply:
        arrays = self._announcements.wait_for_broadcast(request.subject, request.fit)
        return (FitOver(), ()) if arrays is None else (Values(0), arrays)
