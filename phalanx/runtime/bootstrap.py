"""Entry point of every worker: connects it to its launcher, then becomes the user's program.

Run as a file, followed by the program's command line, so that `ps` shows what runs:

    python .../phalanx/runtime/bootstrap.py train.py --lr 1
    python .../phalanx/runtime/bootstrap.py -m package.module
    python .../phalanx/runtime/bootstrap.py --function

The user's program sees what it would see under plain `python`: the same `sys.argv`, `sys.path[0]`, `__main__`
and tracebacks. PHALANX_WORKER_BOOTSTRAP (`WorkerBootstrap`) holds everything else that the worker needs. It is removed
from the environment immediately, so that processes started by the program do not inherit it.
"""
# ruff: noqa: E402

from __future__ import annotations

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if __name__ == "__main__":
    # Replace this folder, which Python put first and whose modules would shadow others of the same name. The root makes
    # the launcher's copy of the package importable even if it is not installed.
    if sys.flags.safe_path:
        sys.path.insert(0, _ROOT)
    else:
        sys.path[0] = _ROOT

import builtins
import contextlib
import faulthandler
import io
import runpy
import signal
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import NoReturn

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import WORKER_BOOTSTRAP
from phalanx.config.launch_config import LaunchConfig
from phalanx.errors import PreemptedError
from phalanx.keras_compat import lazy_imports
from phalanx.runtime import core_affinity, exit_codes, orphan_guard, process_exit, progress

FUNCTION = "--function"
_THIS_FILE = __file__  # Python 3.14 removes the name from the main module before it calls `sys.excepthook`
STACKS_SIGNAL = signal.SIGUSR2
NO_ERROR = b"null"
"""Written instead of a crash report if the program succeeded."""


@dataclass(frozen=True, slots=True)
class WorkerBootstrap:
    """Values that the launcher passes to a worker. Integers are file descriptors, -1 for none.

    Attributes:
        cores: Cores to bind the process to.
        guard: Pipe that ends the process when the launcher is gone.
        stacks: File for stacks, written on STACKS_SIGNAL and when native code crashes.
        error: File for an uncaught error, as JSON.
        prints_errors: Whether to print an uncaught error; otherwise the launcher shows and logs it.
        function, result: The function to call and its result, both pickled. Used only between launcher and worker.
    """

    cores: tuple[int, ...]
    guard: int
    stacks: int
    error: int
    prints_errors: bool = True
    function: int = -1
    result: int = -1

    def encode(self) -> str:
        # Not JSON: importing it would take longer than everything else in this module.
        fields = (self.guard, self.stacks, self.error, int(self.prints_errors))
        return " ".join(map(str, (*fields, self.function, self.result, *self.cores)))

    @classmethod
    def decode(cls, text: str) -> WorkerBootstrap:
        guard, stacks, error, prints, function, result, *share = map(int, text.split())
        return cls(tuple(share), guard, stacks, error, bool(prints), function, result)


def main() -> None:
    start = WorkerBootstrap.decode(process_environment().pop(WORKER_BOOTSTRAP))
    orphan_guard.die_with_launcher(start.guard)
    core_affinity.bind(start.cores)  # before anything can start threads
    for fd in (start.stacks, start.error):
        os.set_inheritable(fd, False)
    faulthandler.enable(start.stacks)
    # In effect once the exiting interpreter has removed its handlers; the process outlives them for a while.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, start.stacks, all_threads=True)
    reporter = _CrashReporter(start.error)
    hook = _install_hook(reporter, None if start.prints_errors else _leave_to_launcher)
    # A background job of a script inherits an ignored SIGINT. Here, only the launcher sends it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lazy_imports.install(_report_import)
    _report_import(None)  # signals the launcher that STACKS_SIGNAL is now handled
    arguments = sys.argv[1:]
    if arguments[0] == FUNCTION:
        _run_function(start, reporter)
    try:
        run_program(arguments)
        _warn_if_not_distributed(is_over=True)
        reporter.record_success()
    except SystemExit as end:
        error = end.__cause__ or end.__context__
        if not end.code:
            reporter.record_success()
        elif error is not None:  # `except Exception: traceback.print_exc(); sys.exit(1)`
            reporter.record(error)
        if end.code:
            # As after an uncaught error. The launcher learns the code only from the exit, and its grace period begins
            # when it sees that another worker has lost this one.
            process_exit.exit_after(0.9 * LaunchConfig.from_environment().grace_s, exit_codes.code_for_system_exit(end))
        raise
    except BaseException as error:
        if sys.excepthook is not hook:  # a custom hook, which may not call ours
            _install_hook(reporter, sys.excepthook)
        if isinstance(error, KeyboardInterrupt):
            _ignore_ctrl_c()
            _import_crash_report()
        raise
    finally:
        _ignore_ctrl_c()


def _ignore_ctrl_c() -> None:
    """Ignore interrupts from now on: the process is exiting, and one would only garble its last output."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _import_crash_report() -> None:
    """Import the module before the hook does. Its imports `exec` strings (dataclasses), and an `exec` in the hook makes
    Python forget that an interrupt ends the process, which then exits with code 1."""
    with contextlib.suppress(Exception):
        from phalanx.runtime import crash_report  # noqa: F401


def _report_import(library: str | None) -> None:
    """Report that the program imports a large library or, for None, continues."""
    if library == "keras":
        # Imported lazily here and below: programs without Keras do not need it, and every worker waits for this module.
        from phalanx.runtime import installed_backend

        installed_backend.replace_missing_backend()
    progress.report(f"{progress.IMPORT_OF}{library}" if library else "start of the program")
    if library is None:
        _warn_if_not_distributed(is_over=False)


def _warn_if_not_distributed(*, is_over: bool) -> None:
    """In a program that has imported Keras, warn about training that no strategy distributes."""
    if "keras" in sys.modules:
        from phalanx.runtime import undistributed_fit

        if is_over:
            undistributed_fit.warn_at_the_end()
        else:
            undistributed_fit.watch_fit()


def _run_function(start: WorkerBootstrap, reporter: _CrashReporter) -> NoReturn:
    from phalanx.runtime import function_call

    code = function_call.run(start.function, start.result, reporter.record)
    _ignore_ctrl_c()
    if code == 0:
        reporter.record_success()
    else:
        process_exit.exit_after(LaunchConfig.from_environment().grace_s, code)
    sys.exit(code)


def run_program(arguments: list[str]) -> None:
    """Become the program that `python *arguments` would run."""
    target = arguments[0]
    main_module = ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    if target == "-m":
        sys.argv[:] = arguments[1:]
        _set_script_path(os.getcwd())
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # as `python -m` does
    elif target == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        _set_script_path("")
        exec(compile(arguments[1], "<string>", "exec"), main_module.__dict__)
    elif _is_archive(target):
        sys.argv[:] = arguments
        _set_script_path(target)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
    else:
        sys.argv[:] = arguments
        path = os.path.abspath(target)
        _set_script_path(os.path.dirname(os.path.realpath(path)))
        main_module.__file__ = path
        main_module.__dict__["__cached__"] = None
        with io.open_code(path) as script:
            source = script.read()
        exec(compile(source, path, "exec", dont_inherit=True), main_module.__dict__)


def _is_archive(script: str) -> bool:
    if os.path.isdir(script):
        return True
    with open(script, "rb") as file:  # avoids importing zipfile; no Python program begins with this
        return file.read(4) == b"PK\x03\x04"


def _set_script_path(path: str) -> None:
    if sys.flags.safe_path:
        sys.path.pop(0)
    else:
        sys.path[0] = path


def without_own_frames(stacks: str) -> str:
    """Stacks as `faulthandler` writes them, without this file's frames, which are at the base of every program."""
    return "".join(line for line in stacks.splitlines(keepends=True) if _THIS_FILE not in line)


class _CrashReporter:
    """Writes the error that ends this process to a file that the launcher reads."""

    def __init__(self, fd: int):
        self._fd = fd
        self._pid = os.getpid()
        self._file = os.fstat(fd)

    def record(self, error: BaseException) -> bool:
        """Write a crash report; return whether the launcher can read it. Never raises, so that the exit continues."""
        with contextlib.suppress(Exception):
            from phalanx.runtime import crash_report

            return self._write(crash_report.encode(crash_report.build_report(error)))
        return False

    def record_success(self) -> None:
        """Record success, for a launcher that cannot obtain the exit code."""
        with contextlib.suppress(OSError):
            self._write(NO_ERROR)

    def _write(self, content: bytes) -> bool:
        if os.getpid() != self._pid:  # a fork, whose exit is not the worker's
            return False
        # If the program closed all descriptors, another file may have this number now.
        if not os.path.samestat(os.fstat(self._fd), self._file):
            return False
        written = os.pwrite(self._fd, content, 0)
        os.ftruncate(self._fd, written)  # the rest of a longer earlier report would make it unreadable
        return written == len(content)


def _install_hook(reporter: _CrashReporter, show: process_exit.Hook | None = None) -> process_exit.Hook:
    sys.excepthook = _ErrorRecorder(reporter, show)
    process_exit.install()
    return sys.excepthook


class _ErrorRecorder:
    """Records an uncaught error for the launcher and prints it with `show` or like Python, without this file's frames.

    Without `show`, an interrupt is only recorded: the failure report shows where every task was, and so many tracebacks
    at once are unreadable. A preemption is not an error, and its stack is of no interest.
    """

    def __init__(self, reporter: _CrashReporter, show: process_exit.Hook | None):
        self._reporter = reporter
        self._show = show or _print_error

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _ignore_ctrl_c()
        while traceback is not None and traceback.tb_frame.f_code.co_filename == _THIS_FILE:
            traceback = traceback.tb_next
        error = error.with_traceback(traceback)
        is_known = self._reporter.record(error)
        show = _print_error if self._show is _leave_to_launcher and not is_known else self._show
        try:
            show(kind, error, traceback)
        finally:
            if isinstance(error, Exception) and not isinstance(error, PreemptedError):
                process_exit.exit_after(LaunchConfig.from_environment().grace_s, exit_codes.code_for_error(error))


def _print_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, PreemptedError):
        print(error, file=sys.stderr)
    elif not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


def _leave_to_launcher(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print nothing: the launcher shows the error of one worker; the same error or its echo from all would bury it."""


if __name__ == "__main__":
    main()
