"""Finds the task that caused a job's end. Pure functions of the observed exits.

When one worker fails, the others lose their peer and fail as well, often before the launcher sees the exit of the
first. The order of the exits is therefore a weak sign, and the kind of each exit a strong one:

    1. its own failure: an exception of the program, a signal that the launcher did not send, `sys.exit(3)`
    2. a collective that timed out: the peer that did not arrive is the cause, but may still hang
    3. a lost peer: another task, which the error names, is the cause. Likewise if JAX aborted the process because its
       service was gone
    4. ended by the launcher: never a cause

An exit without error in the middle of the job (`os._exit(0)`) is the cause if others lost exactly that task.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx import errors
from phalanx.launcher.host_messages import STOPPED, WorkerDiagnostics
from phalanx.runtime import exit_codes

_CONSEQUENCE_CERTAINTY = exit_codes.CONSEQUENCE_CERTAINTY
# Found in the native stack of a process that JAX aborts because it has lost its service, which runs on rank 0.
_JAX_ABORT = "CoordinationService"
# Exit code of a job that a false success ended: the same as that of its survivors.
FALSE_SUCCESS_CODE = errors.PeerLostError.exit_code
PREEMPTED_CODE = errors.PreemptedError.exit_code
INTERRUPTED_CODE = errors.SIGNAL_BASE + signal.SIGINT
HOST_LOST_CODE = errors.PeerLostError.exit_code


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The exit of one task.

    Attributes:
        rank, task, host, pid: Identity of the task and its process.
        returncode: Return code as in `subprocess`; None if the task was lost with its host.
        exit_index: Number of tasks that had exited before.
        was_ended_by_launcher: Whether it exited only after the launcher had sent it a signal.
        others_continue: Whether the others continued without it.
        has_left_early: Whether it left an elastic job with exit code 0 while others still trained.
        is_hung: Whether it was still running at the end of the grace period after a failure.
        trains: Whether it is a chief or a worker.
        diagnostics: Information that it left behind.
    """

    rank: int
    task: str
    host: str
    pid: int
    returncode: int | None
    exit_index: int
    was_ended_by_launcher: bool = False
    others_continue: bool = False
    has_left_early: bool = False
    is_hung: bool = False
    trains: bool = True
    diagnostics: WorkerDiagnostics = field(default_factory=WorkerDiagnostics)

    @property
    def code(self) -> int:
        """Its exit code as a shell reports it, or FALSE_SUCCESS_CODE if it left early."""
        if self.has_left_early:
            return FALSE_SUCCESS_CODE
        return HOST_LOST_CODE if self.returncode is None else exit_codes.code_for_return_code(self.returncode)

    @property
    def distance_from_cause(self) -> int:
        """Distance from the cause: 0 for its own failure, more for the echo of another's, even if the program caught
        the error and exited on its own. An echo is less certain if only the exit code indicates it."""
        if self.returncode is None or self.has_left_early:
            return 0
        by_code = _CONSEQUENCE_CERTAINTY.get(self.code, 0)
        if self.returncode == -signal.SIGABRT and _JAX_ABORT in self.diagnostics.output:
            return 1
        # Even numbers are errors. Odd numbers are exit codes without an error, which the program may have chosen, so
        # they are closer to a cause.
        if self.diagnostics.error is None:
            return max(0, 2 * by_code - 1)
        return 2 * max(by_code, _CONSEQUENCE_CERTAINTY.get(self.diagnostics.error.code, 0))

    @property
    def is_stalled(self) -> bool:
        """Whether it hung. Servers and evaluators run until they are ended, so they count only if a signal stopped
        them."""
        return self.is_hung and (self.trains or self.diagnostics.state == STOPPED)

    @property
    def has_own_error(self) -> bool:
        """Whether it had recorded its own error when it was ended, so that something kept it from exiting."""
        error = self.diagnostics.error
        if not self.is_hung or error is None or error.interrupted:
            return False
        return error.code not in _CONSEQUENCE_CERTAINTY and error.code != errors.EvictedError.exit_code

    @property
    def was_preempted(self) -> bool:
        return (
            self.code == PREEMPTED_CODE
            and self.diagnostics.error is not None
            and self.diagnostics.error.code == PREEMPTED_CODE
        )

    @property
    def has_failed(self) -> bool:
        return self.returncode != 0 or self.has_left_early

    @property
    def description(self) -> str:
        """How it ended, as part of a sentence."""
        return (
            "left with exit code 0 before the end" if self.has_left_early else exit_codes.describe_exit(self.returncode)
        )

    @property
    def failure(self) -> str:
        """How it failed, as part of a sentence. A task that only lost another task is not blamed."""
        how = f"ended, {exit_codes.info_for_code(self.code).name}," if self.distance_from_cause else "failed"
        return f"{self.task} (rank {self.rank}) {how} with exit code {self.code}"


@dataclass(frozen=True, slots=True)
class RootCause:
    """Why the job ended.

    Attributes:
        code: Exit code of the job.
        cause: The exit that led to the others; None if no task failed, the user ended the job, or an elastic job could
            not continue.
        reason: The reason, in one sentence.
        was_requested: Whether the user ended the job.
    """

    code: int
    cause: WorkerExit | None
    reason: str
    was_requested: bool = False

    @property
    def success(self) -> bool:
        return self.code == 0


def find_root_cause(exits: Sequence[WorkerExit], *, interrupted_by: int | None = None) -> RootCause:
    """Find the root cause of a job whose tasks have all exited.

    Args:
        interrupted_by: The signal that made the launcher end the job, if any.
    """
    own = [
        exit_
        for exit_ in exits
        if exit_.has_failed and (not exit_.was_ended_by_launcher or exit_.has_own_error) and not exit_.others_continue
    ]
    if any(exit_.was_preempted for exit_ in exits):
        # All leave after the chief has saved; the last ones may have lost the others.
        return RootCause(PREEMPTED_CODE, None, "the job was asked to stop, and saved a checkpoint first", True)
    if interrupted_by is not None:
        code = errors.SIGNAL_BASE + interrupted_by
        info = exit_codes.info_for_code(code)
        return RootCause(code, None, f"it was stopped from outside: {info.sentence}", True)
    if not own:
        is_whole = not any(exit_.has_failed and not exit_.was_ended_by_launcher for exit_ in exits)
        return RootCause(0, None, "all tasks ended without error" if is_whole else "the others finished the job")
    lost = _find_false_success(exits, own)
    if lost is not None:
        how = "and did not end" if lost.is_stalled else "with exit code 0"
        return RootCause(FALSE_SUCCESS_CODE, lost, _describe_early_exit(lost.task, how))
    # The order of the exits decides last: the echo of a failure is often observed before the failure.
    cause = min(own, key=lambda exit_: (exit_.distance_from_cause, exit_.was_ended_by_launcher, exit_.exit_index))
    if cause.was_ended_by_launcher and cause.diagnostics.error is not None:
        return RootCause(cause.diagnostics.error.code, cause, _reason(cause, exits))
    return RootCause(cause.code, cause, _reason(cause, exits))


def _find_false_success(exits: Sequence[WorkerExit], failed: Sequence[WorkerExit]) -> WorkerExit | None:
    """The task that exited with code 0, or had left without exiting, and that all failed tasks then missed; None if
    there is none."""
    if any(exit_.distance_from_cause == 0 for exit_ in failed):
        return None
    named = Counter(exit_.diagnostics.error.lost for exit_ in failed if exit_.diagnostics.error is not None)
    done = [exit_ for exit_ in exits if (exit_.is_stalled if exit_.was_ended_by_launcher else not exit_.has_failed)]
    missed = [exit_ for exit_ in done if named[exit_.task]]
    return min(missed, key=lambda exit_: exit_.exit_index, default=None)


def _describe_early_exit(task: str, how: str) -> str:
    return f"{task} left the job {how} while the others still depended on it"


def hung_tasks(cause: WorkerExit, exits: Sequence[WorkerExit]) -> list[str]:
    """The tasks that hung while `cause` waited; only the one that its error names, if it names one."""
    return [exit_.task for exit_ in exits if exit_.is_stalled and cause.diagnostics.missed in (None, exit_.task)]


def _reason(cause: WorkerExit, exits: Sequence[WorkerExit]) -> str:
    who = f"{cause.task} (rank {cause.rank}, pid {cause.pid} on {cause.host})"
    error = cause.diagnostics.error
    if cause.returncode is None:
        return f"{who} was lost with its host: the connection to it ended"
    if cause.has_left_early:
        return _describe_early_exit(cause.task, "with exit code 0")
    if cause.code == INTERRUPTED_CODE:
        return f"{who} was interrupted (KeyboardInterrupt or SIGINT)"
    if cause.returncode < 0 and not (cause.was_ended_by_launcher and error is not None):
        return f"{who} was killed by {exit_codes.signal_name(-cause.returncode)}"
    if cause.code in _CONSEQUENCE_CERTAINTY and (hung := hung_tasks(cause, exits)):
        return f"{who} waited for peers that did not arrive: {', '.join(hung)} hung"
    if error is not None:
        what = _headline(error.message)
        return f"{who} failed with {error.kind}: {what}" if what else f"{who} failed with {error.kind}"
    return f"{who} ended with exit code {cause.code}"


def _headline(message: str) -> str:
    """The first informative line of a message. TensorFlow and Keras begin theirs with the location (`in user code:`,
    `Exception encountered when calling Dense.call().`)."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        return f"{lines[0]} {lines[1]}"
    return lines[-1] if lines[0].endswith(":") else lines[0]
