"""How a job ended: it succeeded, a user stopped it, or it failed. A stop is not a failure, whatever its exit code."""

from __future__ import annotations

import signal

from phalanx.errors import SIGNAL_BASE, PreemptedError
from phalanx.monitoring.job_events import JobEnded

RUNNING, SUCCEEDED, STOPPED, FAILED = "running", "succeeded", "stopped", "failed"


def status_of(end: JobEnded) -> str:
    """SUCCEEDED, STOPPED or FAILED. If a task was the cause, the job has failed, whatever its exit code."""
    if end.code == 0:
        return SUCCEEDED
    was_stopped = end.code == PreemptedError.exit_code or _signal_of(end.code) is not None
    return STOPPED if was_stopped and not end.task else FAILED


def describe_ending(end: JobEnded) -> str:
    """Describe in one line why the job ended."""
    if status_of(end) != STOPPED:
        return end.reason
    number = _signal_of(end.code)
    if number is None:
        return "saved a checkpoint and stopped; start it again to continue"
    return f"interrupted ({'Ctrl-C' if number is signal.SIGINT else number.name})"


def _signal_of(code: int) -> signal.Signals | None:
    """The signal that an exit code represents, if any."""
    try:
        return signal.Signals(code - SIGNAL_BASE)
    except ValueError:
        return None
