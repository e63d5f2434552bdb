"""The failure report: why a job ended, the task, step and operation of the failure, and each task's last progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from phalanx.config.keras_backends import BACKENDS, installed_backends
from phalanx.launcher.failures.root_cause import RootCause, WorkerExit, hung_tasks
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


def as_json(root_cause: RootCause, exits: Sequence[WorkerExit]) -> dict[str, Any]:
    """The report for programs, as JSON values. Its names are documented and must not change."""
    info = exit_codes.info_for_code(root_cause.code)
    return {
        "exit_code": root_cause.code,
        "reason": root_cause.reason,
        "cause": root_cause.cause.task if root_cause.cause else None,
        "meaning": f"{info.name}: {info.sentence}",
        "check": _check(root_cause, exits),
        "tasks": [
            {
                **{name: getattr(exit_, name) for name in ("rank", "task", "host", "pid")},
                "by_launcher": exit_.was_ended_by_launcher,
                "hung": exit_.is_hung,
                "exit_code": exit_.code,
                "words": exit_.diagnostics,
            }
            for exit_ in sorted(exits, key=lambda exit_: exit_.rank)
        ],
    }


def render(
    root_cause: RootCause,
    exits: Sequence[WorkerExit],
    *,
    log_dir: Path | None = None,
    full: bool = True,
    fold: bool = False,
    traceback: bool = True,
    color: bool = False,
    hint: str = "",
) -> str:
    """The report as text: first the cause, located in the program's code, then its effect on the other tasks.

    Args:
        root_cause: Root cause of the job's end.
        exits: Exits of all tasks.
        log_dir: Directory of the logs; None if there are none.
        full: Whether to include all tracebacks and whole stacks; otherwise the report is folded and fits a terminal.
        fold: Whether tracebacks only count the frames of libraries.
        traceback: Whether to show tracebacks; not needed if an error already has the cause's traceback.
        color: Whether to color the cause.
        hint: How to see more, if there are no logs.
    """
    exits = sorted(exits, key=lambda exit_: exit_.rank)
    cause = root_cause.cause
    lines = [_RULE, *_cause(root_cause, color=color)]
    if traceback and cause is not None:
        lines += _quoted(cause, exits, full, fold or not full)
    info = exit_codes.info_for_code(root_cause.code)
    lines += ["", f"Exit code {root_cause.code}: {info.name} - {info.sentence}"]
    lines += [f"Check: {_check(root_cause, exits)}", "", "Each task's end and last progress:"]
    name_width = max((len(exit_.task) for exit_ in exits), default=0)
    shown = exits if full else _nearest(exits, cause)
    lines += [
        f"  {exit_.task:<{name_width}}  {_describe_exit(exit_)}; {_describe_last_progress(exit_)}" for exit_ in shown
    ]
    if len(shown) < len(exits):
        lines.append(f"  ... and {len(exits) - len(shown)} more tasks")
    lines += _stacks(exits, cause, full)
    if traceback and full:
        lines += _echoes(exits, cause, fold)
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


def _cause(root_cause: RootCause, *, color: bool) -> list[str]:
    """The first lines: what happened, and where."""
    start, bold, reset = ("\x1b[1;31m", "\x1b[1m", "\x1b[0m") if color else ("", "", "")
    lines = [f"{start}The job ended: {root_cause.reason}{reset}"]
    if root_cause.cause is not None:
        diagnostics = root_cause.cause.diagnostics
        if diagnostics.error is not None and diagnostics.error.origin:
            lines.append(f"  {bold}{diagnostics.error.origin}{reset}")
        if diagnostics.phase is not None:
            lines.append(f"  it was in: {_describe(diagnostics)}")
    return lines


def _quoted(cause: WorkerExit, exits: Sequence[WorkerExit], full: bool, fold: bool) -> list[str]:
    """The traceback of the cause. Without one, the end of its output and the error of a task that lost it."""
    error = cause.diagnostics.error
    if error is not None:
        lines = _traceback(error, fold).splitlines()
        return ["", *(lines if full else _shortened(lines))] if lines else []
    lines = ["", f"{cause.task} said last:", cause.diagnostics.output] if cause.diagnostics.output else []
    errors = ((exit_, exit_.diagnostics.error) for exit_ in exits)
    other, error = next(((exit_, error) for exit_, error in errors if error is not None), (cause, None))
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


def _nearest(exits: Sequence[WorkerExit], cause: WorkerExit | None) -> list[WorkerExit]:
    """The most informative tasks, as many as there is room for: the cause, then those that are not its echo."""
    ordered = sorted(
        exits,
        key=lambda exit_: (
            exit_ is not cause,
            exit_.was_ended_by_launcher and not exit_.is_hung,
            exit_.distance_from_cause,
            exit_.rank,
        ),
    )
    return sorted(ordered[:TASKS_ON_TERMINAL], key=lambda exit_: exit_.rank)


def _stacks(exits: Sequence[WorkerExit], cause: WorkerExit | None, full: bool) -> list[str]:
    lines = []
    for exit_ in exits:
        interrupted = cause is None  # if so, only the position of each task can be reported
        has_frames = 'File "' in exit_.diagnostics.stacks  # a process that is exiting may have none left
        if has_frames and (full or exit_.is_hung or exit_ is cause or interrupted):
            lines += ["", f"Stacks of {exit_.task}{_state(exit_.diagnostics)} (innermost call first):"]
            lines += _indent(_innermost(exit_.diagnostics.stacks, full))
    return lines


def _echoes(exits: Sequence[WorkerExit], cause: WorkerExit | None, fold: bool) -> list[str]:
    """The tracebacks of the other tasks."""
    lines = []
    for exit_ in exits:
        error = exit_.diagnostics.error
        if exit_ is not cause and error is not None and error.traceback and not error.interrupted:
            lines += ["", f"{exit_.task} said:", _traceback(error, fold)]
    return lines


def write(folder: Path, root_cause: RootCause, exits: Sequence[WorkerExit]) -> None:
    """Write the report and its JSON form into the log directory."""
    page = render(root_cause, exits, log_dir=folder).encode(errors="replace")
    fields = msgspec.json.format(msgspec.json.encode(as_json(root_cause, exits)), indent=2)
    for name, content in ((PAGE_FILE, page), (JSON_FILE, fields)):
        with open(folder / name, "wb", opener=open_no_link) as file:
            file.write(content)


def _check(root_cause: RootCause, exits: Sequence[WorkerExit]) -> str:
    """The first thing to check."""
    cause = root_cause.cause
    if cause is None:
        return exit_codes.info_for_code(root_cause.code).check
    if cause.returncode is None:
        return f"that {cause.host} runs and can be reached through ssh"
    if cause.returncode == 0:
        return (
            f"why {cause.task} ended early: os._exit, sys.exit, less data than the others, or a fit, evaluate or "
            f"predict that only some tasks call (under `is_chief`)"
        )
    hung = hung_tasks(cause, exits)
    if hung and cause.code in exit_codes.CONSEQUENCE_CERTAINTY:
        return f"the stacks of {', '.join(hung)} below: that is where the job hung"
    missed = cause.diagnostics.missed
    if missed in [exit_.task for exit_ in exits if exit_.was_ended_by_launcher and exit_.returncode is not None]:
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
    return exit_codes.info_for_code(root_cause.code).check


def _missing_backend(cause: WorkerExit) -> str | None:
    """The Keras backend that the program, or Keras itself, could not import."""
    error = cause.diagnostics.error
    if error is None or error.kind != "ModuleNotFoundError":
        return None
    return next((backend for backend in BACKENDS if error.message == f"No module named '{backend}'"), None)


def _describe_exit(exit_: WorkerExit) -> str:
    if exit_.returncode is None:
        return "lost with its host"
    if exit_.was_ended_by_launcher:
        stopped = f"; {_STATES[STOPPED]}" if exit_.diagnostics.state == STOPPED and not exit_.diagnostics.stacks else ""
        return "ended by the launcher" + (" after the grace time" if exit_.is_hung else "") + stopped
    if exit_.returncode < 0:
        return f"killed by {exit_codes.signal_name(-exit_.returncode)}"
    if exit_.diagnostics.error is not None:
        return f"exit code {exit_.returncode} ({exit_.diagnostics.error.kind})"
    return f"exit code {exit_.returncode}"


def _describe_last_progress(exit_: WorkerExit) -> str:
    if exit_.returncode is None and exit_.diagnostics.phase is None:
        return "its last progress is unknown"
    if exit_.diagnostics.phase is None:
        return "it had not started the program"
    return f"last in {_describe(exit_.diagnostics)}, {exit_.diagnostics.age_s:.1f} s before"


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
