"""Ends a process after an uncaught error: with the error's exit code, promptly, and without losing output."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

# Do not use `from phalanx import errors`, or import names from `exit_codes`: `phalanx.__getattr__` imports this module,
# perhaps while `exit_codes` is being imported.
from phalanx.errors import PreemptedError
from phalanx.runtime import exit_codes

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
CauseFinder = Callable[[BaseException], BaseException | None]

_has_failed = False
_skips_exit_handlers = False
_ending_thread = 0  # id of the thread that ends the process while the main thread may still run
_exit_callbacks: list[Callable[[], object]] = []
_cause_finders: list[CauseFinder] = []


def install() -> None:
    """Make uncaught errors of Phalanx end this process with their `exit_code`.

    The hook installed so far still prints the traceback. Calling this again has no effect.
    """
    previous = sys.excepthook
    if not isinstance(previous, _ExitCodeHook):
        sys.excepthook = _ExitCodeHook(previous)


def end_process(code: int) -> NoReturn:
    """End this process with this code from any thread, without losing output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit(code)


def exit_with_error(error: Exception, *, within_s: float, skip_exit_handlers: bool = False) -> NoReturn:
    """End this process from any thread, as if the main thread did not catch `error`.

    Args:
        error: The reason. Because of it, the main thread may wait forever.
        within_s: Seconds for the exit handlers.
        skip_exit_handlers: Whether to skip the exit handlers.
    """
    global _skips_exit_handlers, _ending_thread
    _skips_exit_handlers = _skips_exit_handlers or skip_exit_handlers
    code = exit_codes.code_for_error(error)
    if _has_failed:  # the main thread is already ending the process
        time.sleep(within_s)
    else:
        _ending_thread = threading.get_ident()
        exit_after(within_s, code)
        sys.excepthook(type(error), error, error.__traceback__)
    end_process(code)


def exit_after(seconds: float, code: int | None = None) -> None:
    """End this process after `seconds` if threads or exit handlers still keep it alive.

    Args:
        code: Exit code; None: that of the uncaught error that ends the process.
    """
    if code is None:
        error = getattr(sys, "last_value", None)
        code = 1 if error is None else exit_codes.code_for_error(error)
    timer = threading.Timer(seconds, end_process, [code])
    timer.daemon = True
    timer.start()


def add_cause_finder(find: CauseFinder) -> None:
    """Treat an uncaught error as raised from the error that `find` returns for it, unless that is None."""
    if find not in _cause_finders:
        _cause_finders.append(find)


def at_exit(function: Callable[[], object]) -> None:
    """Call this at the end of the process: with the exit handlers, but immediately after an uncaught error.

    Exit handlers run only after all threads of the program, which may wait for other tasks, which wait for this
    process. The function may therefore be called twice.
    """
    if function not in _exit_callbacks:
        atexit.register(function)
        _exit_callbacks.append(function)


def has_failed() -> bool:
    """Whether this process is exiting because of an uncaught error; for exit handlers."""
    return _has_failed


def failure() -> str:
    """The uncaught error that ends this process, in one line; empty if there is none."""
    error = getattr(sys, "last_value", None)
    if not _has_failed or error is None:
        return ""
    return f"{type(error).__name__}: {exit_codes.message(error)}".partition("\n")[0]


class _ExitCodeHook:
    """Prints an uncaught error with the previous hook, then ends the process with the error's exit code."""

    _running_in = 0  # id of the thread

    def __init__(self, previous: Hook):
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # On the class, because several nested hooks may have been installed.
        if _ExitCodeHook._running_in == threading.get_ident():
            # Called by a custom hook inside an outer `_ExitCodeHook`, which ends the process.
            self._print(kind, error, traceback)
            return
        if _ending_thread not in (0, threading.get_ident()):
            threading.Event().wait()  # that thread ends the process
        global _has_failed
        _has_failed = not isinstance(error, PreemptedError)
        causes = [cause for find in _cause_finders if (cause := find(error)) is not None]
        if causes and error.__cause__ is None:
            error.__cause__ = causes[0]
        _ExitCodeHook._running_in = threading.get_ident()
        try:
            self._print(kind, error, traceback)
        except Exception as problem:  # in a custom hook; the exit code must not depend on it
            _print_both(problem, error, traceback)
        finally:
            _ExitCodeHook._running_in = 0
        if isinstance(error, Exception) and not _is_interactive():
            if (code := exit_codes.code_for_error(error)) != 1:
                if _skips_exit_handlers:
                    end_process(code)
                _end(code)
            # With code 1, Python itself ends the process, and waits for threads before it calls exit handlers.
            for callback in reversed(_exit_callbacks):
                callback()

    def _print(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, PreemptedError) and self._previous is sys.__excepthook__:
            print(error, file=sys.stderr)  # not an error, and its stack is of no interest
        else:
            self._previous(kind, error, traceback)


def _print_both(problem: Exception, error: BaseException, traceback: TracebackType | None) -> None:
    """Print both errors, as Python does when a hook fails."""
    with contextlib.suppress(Exception):  # standard error may be closed
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(problem), problem, problem.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, traceback)


def _is_interactive() -> bool:
    """Whether this is an interactive session, where an error does not end the process."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _end(code: int) -> None:
    """End this process now: exit handlers run and files are written, but the interpreter is not finalized.

    Finalization takes one to three seconds with a backend loaded, more if the lost peer's host is busy, and waits for
    threads that may be waiting for the lost peer.
    """
    try:
        atexit._run_exitfuncs()
    finally:
        gc.unfreeze()  # frozen objects are not listed
        for each in gc.get_objects():
            if issubclass(type(each), _FILES):
                with contextlib.suppress(Exception):  # closed, or without a reader
                    each.flush()
        os._exit(code)


_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
