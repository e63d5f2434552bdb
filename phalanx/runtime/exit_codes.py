"""Which error ends a process with which exit code, and what each code means.

`docs/failures.md` is the same for readers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from phalanx import errors

# A process whose exit is only the echo of another's failure ends with one of these.
CONSEQUENCES = {errors.PeerLostError.exit_code: 2, errors.CollectiveTimeoutError.exit_code: 1}
SIGNAL_BASE = 128


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an exit code says: the error's name, one sentence, and what to check."""

    name: str
    sentence: str
    check: str


MEANINGS: dict[int, Meaning] = {
    0: Meaning("success", "the program ended as it should", "nothing"),
    1: Meaning(
        "the program's own error",
        "the program raised an exception, or ended itself with this code",
        "the traceback below; whether the program fails in the same way on one process",
    ),
    2: Meaning("usage", "the command line was not understood", "`phalanx run --help`"),
    errors.ConfigurationError.exit_code: Meaning(
        "ConfigurationError",
        "the job is described wrongly: TF_CONFIG, arguments or environment",
        "the message, which says what to write instead; `phalanx doctor`",
    ),
    errors.UnsupportedError.exit_code: Meaning(
        "UnsupportedError",
        "what was asked cannot be done on this backend or strategy",
        "the message, which names what can",
    ),
    errors.RendezvousError.exit_code: Meaning(
        "RendezvousError",
        "the tasks of the job did not find each other in time",
        "that the tasks named in the message run, that their addresses can be reached (`phalanx doctor`), "
        "and that all have the same PHALANX_SECRET (and, with TLS, certificates of one PHALANX_TLS_CA)",
    ),
    errors.DisagreementError.exit_code: Meaning(
        "DisagreementError",
        "the tasks of the job differ in what must be equal",
        "both values in the message: the same program, versions, backend and seed must run on every task",
    ),
    errors.CollectiveMismatchError.exit_code: Meaning(
        "CollectiveMismatchError",
        "the ranks called different collectives, or the same one with other shapes or dtypes",
        "what the program does on some ranks only (`if rank == 0: ...`), and data of unequal shape",
    ),
    errors.CollectiveTimeoutError.exit_code: Meaning(
        "CollectiveTimeoutError",
        "a rank is connected but did not come to the collective in time",
        "the stack of the rank that hung, its load, its input; PHALANX_TIMEOUT if it is only slow",
    ),
    errors.PhalanxError.exit_code: Meaning(
        "PhalanxError", "a defect in Phalanx", "please report it with this page and the log directory"
    ),
    errors.PeerLostError.exit_code: Meaning(
        "PeerLostError",
        "another member of the job died or left",
        "the end of the lost task's output: it is the cause, this is the consequence; if its host did not answer, "
        "the network between the two",
    ),
    errors.FrameError.exit_code: Meaning(
        "FrameError",
        "bytes on a connection between two tasks are not what Phalanx sends",
        "that all tasks run the same version of Phalanx, and that nothing on the network alters the traffic",
    ),
    errors.EvictedError.exit_code: Meaning(
        "EvictedError",
        "the task made no progress for too long, and the others went on without it",
        "what stopped it: its stack, its load, its input; `phalanx run` starts it again in jobs with parameter servers",
    ),
    errors.PreemptedError.exit_code: Meaning(
        "PreemptedError",
        "the job was told to end, and has taken a checkpoint first",
        "nothing: started again, it goes on there",
    ),
    SIGNAL_BASE + signal.SIGINT: Meaning("interrupted", "somebody pressed Ctrl-C", "nothing"),
    SIGNAL_BASE + signal.SIGTERM: Meaning(
        "terminated", "SIGTERM was received", "who ended the job: the scheduler, a time limit, `kill`"
    ),
    SIGNAL_BASE + signal.SIGHUP: Meaning(
        "hang-up",
        "the terminal or the ssh connection was closed",
        "start long jobs under tmux, nohup or a scheduler",
    ),
    SIGNAL_BASE + signal.SIGKILL: Meaning(
        "killed",
        "SIGKILL was received, which a process cannot catch",
        "memory: the kernel kills the largest process when none is left (`dmesg | grep -i oom`, the container's limit)",
    ),
    SIGNAL_BASE + signal.SIGSEGV: Meaning(
        "segmentation fault",
        "native code accessed memory that is not its own",
        "the stack below; versions of the backend and of other native packages",
    ),
    SIGNAL_BASE + signal.SIGABRT: Meaning(
        "abort", "native code gave up", "the last lines of the task's output; versions of the backend"
    ),
    SIGNAL_BASE + signal.SIGBUS: Meaning(
        "bus error",
        "mapped memory could not be provided",
        "free space in /dev/shm and of the file systems whose files are mapped",
    ),
}


def meaning(code: int) -> Meaning:
    """What an exit code means; every code has a meaning, if only a general one."""
    if code in MEANINGS:
        return MEANINGS[code]
    if code - SIGNAL_BASE in signal.valid_signals():
        name = signal_name(code - SIGNAL_BASE)
        return Meaning(name, f"the process was ended by {name}", "who or what sent the signal")
    return MEANINGS[1]


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; numbers without a name keep their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(returncode: int | None) -> str:
    """How a task has ended that is started again, as a part of a sentence; None: its host is gone."""
    if returncode is None:
        return "was lost with its host"
    if returncode < 0:
        return f"was killed by {signal_name(-returncode)}"
    if returncode == errors.EvictedError.exit_code:
        return "was left out by the others"
    return f"ended with exit code {returncode}"


def of_return_code(returncode: int) -> int:
    """The exit code as a shell has it: a process killed by signal n ends with 128 + n."""
    return SIGNAL_BASE - returncode if returncode < 0 else returncode


def of_error(error: BaseException) -> int:
    """The code with which a process ends that does not catch `error`.

    An error that was raised `from` one of Phalanx's counts as that one: wrapping it does not change the
    cause.
    """
    return next((cause.exit_code for cause in causes(error) if isinstance(cause, errors.PhalanxError)), 1)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised `from`, and so on; `raise error from error` makes it its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def install() -> None:
    """From now on an uncaught error of Phalanx ends this process with the error's `exit_code`.

    The traceback is printed as before, by whatever hook is installed. Calling it again changes nothing.
    """
    previous = sys.excepthook
    if isinstance(previous, _ExitCodeHook):
        return
    sys.excepthook = _ExitCodeHook(previous)


_failed = False
_leaving: list[Callable[[], object]] = []


def end_process(code: int) -> NoReturn:
    """End this process with this code from wherever it is called; what was printed is not lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads
            stream.flush()
    os._exit(code)


_finders: list[Callable[[BaseException], BaseException | None]] = []


def reveal(find: Callable[[BaseException], BaseException | None]) -> None:
    """Have an uncaught error shown, and counted, as raised from what `find` finds behind it, if it finds anything."""
    if find not in _finders:
        _finders.append(find)


def at_exit(function: Callable[[], object]) -> None:
    """Call this at the end of the process: with the exit handlers, but after an uncaught error at once.

    Exit handlers run when all threads of the program have ended, which may wait for those of other tasks, and these for
    us. So the function may be called twice.
    """
    if function not in _leaving:
        atexit.register(function)
        _leaving.append(function)


def has_failed() -> bool:
    """Whether this process ends because of an uncaught error; for exit handlers."""
    return _failed


def failure() -> str:
    """The uncaught error because of which this process ends, in a line; empty where there is none."""
    error = getattr(sys, "last_value", None)
    if not _failed or error is None:
        return ""
    return f"{type(error).__name__}: {message(error)}".partition("\n")[0]


def message(error: BaseException) -> str:
    """What an error says, as text that can be sent: it may be unable to say it, or name a file that is no UTF-8."""
    try:
        text = str(error)
    except Exception:
        text = "<exception str() failed>"  # as in tracebacks
    return sendable(text)


def sendable(text: str) -> str:
    """The text with those characters escaped that UTF-8 does not have, as on standard error."""
    return text.encode(errors="backslashreplace").decode()


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _ExitCodeHook:
    """Has an uncaught error printed by another hook, then ends the process with its code."""

    _at_work = False

    def __init__(self, previous: Hook):
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if _ExitCodeHook._at_work:  # a hook around a hook that goes on to this one: the outer one sees to the end
            self._print(kind, error, traceback)
            return
        global _failed
        causes = [cause for find in _finders if (cause := find(error)) is not None]
        if causes and error.__cause__ is None:
            error.__cause__ = causes[0]
        _failed = not isinstance(error, errors.PreemptedError)
        _ExitCodeHook._at_work = True
        try:
            self._print(kind, error, traceback)
        except Exception as problem:  # of a hook of the program's; the code must not depend on it
            _print_both(problem, error, traceback)
        finally:
            _ExitCodeHook._at_work = False
        code = of_error(error)
        if isinstance(error, Exception) and not _is_interactive():
            if code != 1:
                _end(code)
            for leave in reversed(_leaving):
                leave()

    def _print(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, errors.PreemptedError) and self._previous is sys.__excepthook__:
            print(error, file=sys.stderr)  # nothing is wrong, and the stack says nothing
        else:
            self._previous(kind, error, traceback)


def _print_both(problem: Exception, error: BaseException, traceback: TracebackType | None) -> None:
    """As Python does where a hook fails."""
    with contextlib.suppress(Exception):  # standard error may be closed
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(problem), problem, problem.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, traceback)


def _is_interactive() -> bool:
    """Whether somebody sits at a prompt, where an error ends nothing."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _end(code: int) -> None:
    """End this process now: exit handlers run and files are written, but the interpreter is not taken down.

    That takes one to three seconds with a backend loaded, more where the lost peer's host is busy, and waits
    for threads that may be waiting for the lost peer.
    """
    try:
        atexit._run_exitfuncs()
    finally:
        gc.unfreeze()  # frozen objects are not listed
        for each in gc.get_objects():
            if issubclass(type(each), _FILES):
                with contextlib.suppress(Exception):  # closed, or its reader is gone
                    each.flush()
        os._exit(code)


_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
