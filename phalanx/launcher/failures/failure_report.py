"""The failure report: why a job ended, the task, step and operation of the failure, and each task's last progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from phalanx.config.keras_backends import BACKENDS, installed_backends
from phalanx.launcher.failures.root_cause import RootCause, WorkerExit, waited_for
from phalanx.launcher.host_messages import STOPPED, WorkerDiagnostics
from phalanx.launcher.log_directory import JSON_FILE, PAGE_FILE, open_no_link
from phalanx.monitoring.job_wording import place
from phalanx.runtime import exit_codes
from phalanx.runtime.crash_report import CrashReport

# Limits that keep the report to one page; the files are complete.
STACK_LINES_ON_TERMINAL = 16
TRACEBACK_LINES_ON_TERMINAL = 16
TASKS_ON_TERMINAL = 6
# First lines of a shortened traceback: where the program began, and its first call.
_FIRST_LINES = 2
_RULE = "-" * 78
_AS_FILES = f", and this report as {PAGE_FILE} and {JSON_FILE}"

_STATES = {
    "R": "it was computing",
    "S": "it was waiting",
    "D": "it was waiting for a disk or a network file system",
    STOPPED: "it was stopped (SIGSTOP or a debugger)",
    "Z": "it had ended",
}


def as_json(verdict: RootCause, ends: Sequence[WorkerExit]) -> dict[str, Any]:
    """The report for programs, as JSON values. Its names are documented and must not change."""
    meaning = exit_codes.meaning(verdict.code)
    return {
        "exit_code": verdict.code,
        "reason": verdict.reason,
        "cause": verdict.cause.task if verdict.cause else None,
        "meaning": f"{meaning.name}: {meaning.sentence}",
        "check": _check(verdict, ends),
        "tasks": [
            {
                **{name: getattr(end, name) for name in ("rank", "task", "host", "pid", "by_launcher", "hung")},
                "exit_code": end.code,
                "words": end.diagnostics,
            }
            for end in sorted(ends, key=lambda end: end.rank)
        ],
    }


def render(
    verdict: RootCause,
    ends: Sequence[WorkerExit],
    *,
    log_dir: Path | None = None,
    full: bool = True,
    fold: bool = False,
    traceback: bool = True,
    colour: bool = False,
    hint: str = "",
) -> str:
    """The report as text: first the cause, located in the program's code, then its effect on the other tasks.

    Args:
        verdict: Root cause of the job's end.
        ends: Exits of all tasks.
        log_dir: Directory of the logs; None if there are none.
        full: Whether to include all tracebacks and whole stacks; otherwise the report is folded and fits a terminal.
        fold: Whether tracebacks only count the frames of libraries.
        traceback: Whether to show tracebacks; not needed if an error already has the cause's traceback.
        colour: Whether to color the cause.
        hint: How to see more, if there are no logs.
    """
    ends = sorted(ends, key=lambda end: end.rank)
    cause = verdict.cause
    lines = [_RULE, *_cause(verdict, colour=colour)]
    if traceback and cause is not None:
        lines += _quoted(cause, ends, full, fold or not full)
    meaning = exit_codes.meaning(verdict.code)
    lines += ["", f"Exit code {verdict.code}: {meaning.name} - {meaning.sentence}"]
    lines += [f"Check: {_check(verdict, ends)}", "", "Each task's end and last progress:"]
    name_width = max((len(end.task) for end in ends), default=0)
    shown = ends if full else _nearest(ends, cause)
    lines += [f"  {end.task:<{name_width}}  {_end(end)}; {_last(end)}" for end in shown]
    if len(shown) < len(ends):
        lines.append(f"  ... and {len(ends) - len(shown)} more tasks")
    lines += _stacks(ends, cause, full)
    if traceback and full:
        lines += _echoes(ends, cause, fold)
    if log_dir is not None:
        lines += ["", f"The whole output of each task{_AS_FILES}: {log_dir}"]
    elif hint:
        lines += ["", hint]
    lines.append(_RULE)
    return "\n".join(lines) + "\n"


def without_missing_files(page: str, log_dir: Path | None) -> str:
    """The report for observers of a job. It mentions its files only if they exist in the log directory."""
    if log_dir is not None and all((log_dir / name).is_file() for name in (PAGE_FILE, JSON_FILE)):
        return page
    return page.replace(_AS_FILES, "")


def _cause(verdict: RootCause, *, colour: bool) -> list[str]:
    """The first lines: what happened, and where."""
    start, bold, end = ("\x1b[1;31m", "\x1b[1m", "\x1b[0m") if colour else ("", "", "")
    lines = [f"{start}The job ended: {verdict.reason}{end}"]
    if verdict.cause is not None:
        diagnostics = verdict.cause.diagnostics
        if diagnostics.error is not None and diagnostics.error.origin:
            lines.append(f"  {bold}{diagnostics.error.origin}{end}")
        if diagnostics.phase is not None:
            lines.append(f"  it was in: {_describe(diagnostics)}")
    return lines


def _quoted(cause: WorkerExit, ends: Sequence[WorkerExit], full: bool, fold: bool) -> list[str]:
    """The traceback of the cause. Without one, the end of its output and the error of a task that lost it."""
    error = cause.diagnostics.error
    if error is not None:
        lines = _traceback(error, fold).splitlines()
        return ["", *(lines if full else _shortened(lines))] if lines else []
    lines = ["", f"{cause.task} said last:", cause.diagnostics.output] if cause.diagnostics.output else []
    errors = ((end, end.diagnostics.error) for end in ends)
    other, error = next(((end, error) for end, error in errors if error is not None), (cause, None))
    if error is not None:
        lines += ["", f"{other.task} said: {error.kind}: {error.message}"]
    return lines


def _traceback(error: CrashReport, fold: bool) -> str:
    """The traceback, folded if available: a worker with an earlier version sends no folded one."""
    return ((fold and error.folded) or error.traceback).rstrip("\n")


def _shortened(lines: list[str]) -> list[str]:
    """The beginning, and the end with the error itself."""
    if len(lines) <= TRACEBACK_LINES_ON_TERMINAL:
        return lines
    left_out = len(lines) - TRACEBACK_LINES_ON_TERMINAL + 1
    return [*lines[:_FIRST_LINES], f"  ... {left_out} lines", *lines[_FIRST_LINES + left_out :]]


def _nearest(ends: Sequence[WorkerExit], cause: WorkerExit | None) -> list[WorkerExit]:
    """The most informative tasks, as many as there is room for: the cause, then those that are not its echo."""
    ordered = sorted(ends, key=lambda end: (end is not cause, end.by_launcher and not end.hung, end.distance, end.rank))
    return sorted(ordered[:TASKS_ON_TERMINAL], key=lambda end: end.rank)


def _stacks(ends: Sequence[WorkerExit], cause: WorkerExit | None, full: bool) -> list[str]:
    lines = []
    for end in ends:
        interrupted = cause is None  # if so, only the position of each task can be reported
        has_frames = 'File "' in end.diagnostics.stacks  # a process that is exiting may have none left
        if has_frames and (full or end.hung or end is cause or interrupted):
            lines += ["", f"Stacks of {end.task}{_state(end.diagnostics)} (innermost call first):"]
            lines += _indent(_innermost(end.diagnostics.stacks, full))
    return lines


def _echoes(ends: Sequence[WorkerExit], cause: WorkerExit | None, fold: bool) -> list[str]:
    """The tracebacks of the other tasks."""
    lines = []
    for end in ends:
        error = end.diagnostics.error
        if end is not cause and error is not None and error.traceback and not error.interrupted:
            lines += ["", f"{end.task} said:", _traceback(error, fold)]
    return lines


def write(folder: Path, verdict: RootCause, ends: Sequence[WorkerExit]) -> None:
    """Write the report and its JSON form into the log directory."""
    page = render(verdict, ends, log_dir=folder).encode(errors="replace")
    fields = msgspec.json.format(msgspec.json.encode(as_json(verdict, ends)), indent=2)
    for name, content in ((PAGE_FILE, page), (JSON_FILE, fields)):
        with open(folder / name, "wb", opener=open_no_link) as file:
            file.write(content)


def _check(verdict: RootCause, ends: Sequence[WorkerExit]) -> str:
    """The first thing to check."""
    cause = verdict.cause
    if cause is None:
        return exit_codes.meaning(verdict.code).check
    if cause.returncode is None:
        return f"that {cause.host} runs and can be reached through ssh"
    if cause.returncode == 0:
        return (
            f"why {cause.task} ended early: os._exit, sys.exit, less data than the others, or a fit, evaluate or "
            f"predict that only some tasks call (under `is_chief`)"
        )
    hung = waited_for(cause, ends)
    if hung and cause.code in exit_codes.CONSEQUENCES:
        return f"the stacks of {', '.join(hung)} below: that is where the job hung"
    missed = cause.diagnostics.missed
    if missed in [end.task for end in ends if end.by_launcher and end.returncode is not None]:
        return f"the network between {cause.task} and {missed}, which was still there when the launcher ended it"
    if backend := _missing_backend(cause):
        others = " or ".join(f"--backend {other}" for other in installed_backends() if other != backend)
        return (
            f"that {backend} is installed, or choose another backend"
            + (f" with {others}" if others else "")
            + "; Keras uses tensorflow where neither --backend nor KERAS_BACKEND nor keras.json names one"
        )
    if cause.returncode > 0 and cause.diagnostics.error is None:
        return "the end of its output, and where the program ends itself with this code (`sys.exit`)"
    return exit_codes.meaning(verdict.code).check


def _missing_backend(cause: WorkerExit) -> str | None:
    """The Keras backend that the program, or Keras itself, could not import."""
    error = cause.diagnostics.error
    if error is None or error.kind != "ModuleNotFoundError":
        return None
    return next((backend for backend in BACKENDS if error.message == f"No module named '{backend}'"), None)


def _end(end: WorkerExit) -> str:
    if end.returncode is None:
        return "lost with its host"
    if end.by_launcher:
        stopped = f"; {_STATES[STOPPED]}" if end.diagnostics.state == STOPPED and not end.diagnostics.stacks else ""
        return "ended by the launcher" + (" after the grace time" if end.hung else "") + stopped
    if end.returncode < 0:
        return f"killed by {exit_codes.signal_name(-end.returncode)}"
    if end.diagnostics.error is not None:
        return f"exit code {end.returncode} ({end.diagnostics.error.kind})"
    return f"exit code {end.returncode}"


def _last(end: WorkerExit) -> str:
    if end.returncode is None and end.diagnostics.phase is None:
        return "its last progress is unknown"
    if end.diagnostics.phase is None:
        return "it had not started the program"
    return f"last in {_describe(end.diagnostics)}, {end.diagnostics.age_s:.1f} s before"


def _describe(diagnostics: WorkerDiagnostics) -> str:
    where = place(diagnostics.epoch, diagnostics.step)
    return f"{diagnostics.phase or '?'}, {where}" if where else diagnostics.phase or "?"


def _state(diagnostics: WorkerDiagnostics) -> str:
    return f"; {_STATES[diagnostics.state]}" if diagnostics.state in _STATES else ""


def _innermost(stacks: str, full: bool) -> list[str]:
    lines = stacks.rstrip().splitlines()
    if full or len(lines) <= STACK_LINES_ON_TERMINAL:
        return lines
    # faulthandler lists the main thread, which matters most, last.
    heads = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    main = lines[heads[-1] :] if heads else lines
    return main[:STACK_LINES_ON_TERMINAL]


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
