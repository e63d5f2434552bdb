"""Exit codes of processes: the code for each error, and the meaning of each code.

`docs/reference/exit-codes.md` has the same table.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx import errors
from phalanx.errors import SIGNAL_BASE

# Exit codes of processes whose failure is a consequence of another's; the larger the number, the more certain.
CONSEQUENCE_CERTAINTY = {errors.PeerLostError.exit_code: 2, errors.CollectiveTimeoutError.exit_code: 1}


@dataclass(frozen=True, slots=True)
class ExitCodeInfo:
    """The meaning of an exit code: the error's name, one sentence, and what to check."""

    name: str
    sentence: str
    check: str


_ERRORS: dict[type[errors.PhalanxError | errors.PreemptedError], tuple[str, str]] = {
    errors.ConfigurationError: (
        "the job is described wrongly: TF_CONFIG, arguments or environment",
        "the message, which says what to write instead; `phalanx doctor`",
    ),
    errors.UnsupportedError: (
        "this backend or strategy cannot do what was requested",
        "the message, which names what can",
    ),
    errors.RendezvousError: (
        "the tasks of the job did not find each other in time",
        "that the tasks named in the message run, that their addresses can be reached (`phalanx doctor`), "
        "and that all have the same PHALANX_SECRET (and, with TLS, certificates of one PHALANX_TLS_CA)",
    ),
    errors.DisagreementError: (
        "the tasks of the job differ in what must be equal",
        "both values in the message: the same program, versions, backend and seed must run on every task",
    ),
    errors.CollectiveMismatchError: (
        "the ranks called different collectives, or the same one with other shapes or dtypes",
        "what the program does on some ranks only (`if rank == 0: ...`), and data of unequal shape",
    ),
    errors.CollectiveTimeoutError: (
        "a rank is connected but did not arrive at the collective in time",
        "the stack of the rank that hung, its load, its input; PHALANX_TIMEOUT if it is only slow",
    ),
    errors.PhalanxError: ("a defect in Phalanx", "please report it with this page and the log directory"),
    errors.PeerLostError: (
        "another member of the job died or left",
        "the end of the lost task's output: it is the cause, this is the consequence; if its host did not answer, "
        "the network between the two",
    ),
    errors.FrameError: (
        "bytes on a connection between two tasks are not what Phalanx sends",
        "that all tasks run the same version of Phalanx, and that nothing on the network alters the traffic",
    ),
    errors.EvictedError: (
        "the task made no progress for too long, and the others continued without it",
        "what stopped it: its stack, its load, its input; `phalanx run` starts it again in jobs with parameter servers",
    ),
    errors.SupersededError: (
        "another process has claimed the directory to which the task wrote its checkpoints",
        "nothing, if the task was cut off from its job, which continues elsewhere; otherwise that each job has its "
        "own directory",
    ),
    errors.PreemptedError: (
        "the job was asked to stop, and saved a checkpoint first",
        "nothing: started again, it continues from the checkpoint that the last line names",
    ),
}
"""One sentence about each error, and what to check."""

EXIT_CODE_INFO: dict[int, ExitCodeInfo] = {
    0: ExitCodeInfo("success", "the program ended without error", "nothing"),
    1: ExitCodeInfo(
        "the program's own error",
        "the program raised an exception, or ended itself with this code",
        "the traceback; whether the program fails in the same way on one process",
    ),
    2: ExitCodeInfo("usage", "the command line was not understood", "`phalanx run --help`"),
    **{error.exit_code: ExitCodeInfo(error.__name__, *texts) for error, texts in _ERRORS.items()},
    SIGNAL_BASE + signal.SIGINT: ExitCodeInfo("interrupted", "Ctrl-C was pressed", "nothing"),
    SIGNAL_BASE + signal.SIGTERM: ExitCodeInfo(
        "terminated", "SIGTERM was received", "who ended the job: the scheduler, a time limit, `kill`"
    ),
    SIGNAL_BASE + signal.SIGHUP: ExitCodeInfo(
        "hang-up",
        "the terminal or the ssh connection was closed",
        "start long jobs under tmux, nohup or a scheduler",
    ),
    SIGNAL_BASE + signal.SIGKILL: ExitCodeInfo(
        "killed",
        "SIGKILL was received, which a process cannot catch",
        "memory: the kernel kills the largest process when none is left (`dmesg | grep -i oom`, the container's limit)",
    ),
    SIGNAL_BASE + signal.SIGSEGV: ExitCodeInfo(
        "segmentation fault",
        "native code accessed memory that is not its own",
        "the stack below; versions of the backend and of other native packages",
    ),
    SIGNAL_BASE + signal.SIGABRT: ExitCodeInfo(
        "abort", "native code aborted", "the last lines of the task's output; versions of the backend"
    ),
    SIGNAL_BASE + signal.SIGBUS: ExitCodeInfo(
        "bus error",
        "mapped memory could not be provided",
        "free space in /dev/shm and of the file systems whose files are mapped",
    ),
}


def info_for_code(code: int) -> ExitCodeInfo:
    """The meaning of an exit code; a general one for codes that are not in the table."""
    if code in EXIT_CODE_INFO:
        return EXIT_CODE_INFO[code]
    if code - SIGNAL_BASE in signal.valid_signals():
        name = signal_name(code - SIGNAL_BASE)
        return ExitCodeInfo(name, f"the process was ended by {name}", "who or what sent the signal")
    return EXIT_CODE_INFO[1]


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; numbers without a name keep their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(returncode: int | None) -> str:
    """How a task ended, as part of a sentence. A `returncode` of None means that it was lost with its host."""
    if returncode is None:
        return "was lost with its host"
    if returncode < 0:
        return f"was killed by {signal_name(-returncode)}"
    if returncode == errors.EvictedError.exit_code:
        return "was evicted"
    return f"ended with exit code {returncode}"


def code_for_return_code(returncode: int) -> int:
    """The exit code as a shell reports it: 128 + n for a process killed by signal n."""
    return SIGNAL_BASE - returncode if returncode < 0 else returncode


def code_for_error(error: BaseException) -> int:
    """The exit code of a process that does not catch `error`.

    An error raised `from` one of Phalanx's errors counts as that error: wrapping does not change the cause.
    """
    return next((cause.exit_code for cause in causes(error) if isinstance(cause, errors.PhalanxError)), 1)


def code_for_system_exit(end: SystemExit) -> int:
    """The exit code of a process that calls `sys.exit(end.code)`: 1 for a message."""
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def causes(error: BaseException | None, *, handled: bool = False) -> Iterator[BaseException]:
    """Yield the error, the error that it was raised `from`, and so on, ending at a cycle (`raise error from error`).

    Args:
        handled: Whether to include errors that were being handled when an error was raised, as tracebacks do.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        hides = error.__suppress_context__ or not handled
        error = error.__cause__ or (None if hides else error.__context__)


def message(error: BaseException) -> str:
    """The text of an error in a form that can be sent: `str` may fail, and the text may not be valid UTF-8."""
    try:
        text = str(error)
    except Exception:
        text = "<exception str() failed>"  # as in tracebacks
    return sendable(text)


def sendable(text: str) -> str:
    """Escape the characters that UTF-8 cannot encode, as on standard error."""
    return text.encode(errors="backslashreplace").decode()
