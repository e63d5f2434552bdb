"""The results of the chief's validation after an epoch, for the logs of the other workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server_messages import (
    Acknowledged,
    EpochOver,
    FitOver,
    RequestValidationLogs,
    ValidationLogs,
    Values,
)
from phalanx.parameter_server.server_protocol import CHIEF_WORKER

Array = np.ndarray[Any, Any]


class EpochValidation:
    """Newest validation results. Each worker's thread uses it; protected by the schedule's lock."""

    def __init__(self, schedule: StepSchedule) -> None:
        self._schedule = schedule
        # The newest, even of a `fit` that has ended, since a worker may request its last results afterwards.
        self._sent = ValidationLogs(fit=-1, epoch=-1, era=0)
        self._logs: list[Array] = []

    def store(self, message: ValidationLogs, logs: Sequence[memoryview]) -> None:
        """Store the chief's results."""
        with self._schedule.changed:
            self._sent = message
            self._logs = [np.frombuffer(bytes(buffer), np.uint8) for buffer in logs]
            self._schedule.changed.notify_all()

    def wait(
        self, request: RequestValidationLogs, timeout_s: float
    ) -> tuple[Values | Acknowledged | EpochOver | FitOver, Sequence[Array]]:
        """The response to a worker; see `RequestValidationLogs`. Raises: see `WorkerMembership.wait_for_chief`."""
        schedule, members = self._schedule, self._schedule.members
        with schedule.changed:
            requested_at = schedule.clock()
            while True:
                if self._covers(request):
                    return Values(0), self._logs
                fit = schedule.fit
                if (over := fit.superseded_response(request.fit, request.era)) is not None:
                    return over, ()
                if fit.epoch is not None and fit.epoch.number > request.epoch:
                    return Acknowledged(), ()
                heard_at = max(requested_at, schedule.last_progress, members.chief_heard_at)
                members.wait_for_chief(
                    heard_at + timeout_s,
                    lambda: f"{members.names[CHIEF_WORKER]} did not validate after epoch {request.epoch + 1} of `fit`",
                )

    def _covers(self, request: RequestValidationLogs) -> bool:
        # Results of another era are from a chief that was restarted since.
        sent = self._sent
        return (sent.fit, sent.era) == (request.fit, request.era) and sent.epoch >= request.epoch
