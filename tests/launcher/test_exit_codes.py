from __future__ import annotations

import inspect
import time
from pathlib import Path

import pytest

from phalanx import errors
from phalanx.runtime import exit_codes
from tests.launcher.conftest import Launcher

ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.PhalanxError) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", ERRORS)
def test_each_error_has_a_code_with_a_meaning_of_its_own(kind: type[errors.PhalanxError]) -> None:
    info = exit_codes.EXIT_CODE_INFO[kind.exit_code]
    assert info.name.endswith("Error")
    assert info.check


def test_every_code_means_something() -> None:
    assert exit_codes.info_for_code(255).name
    assert exit_codes.info_for_code(128 + 64).name == "SIGRTMAX"
    assert (
        exit_codes.info_for_code(200) == exit_codes.info_for_code(255) == exit_codes.info_for_code(1)
    )  # `sys.exit(-1)`: no signals
    assert "SIGUSR1" in exit_codes.info_for_code(128 + 10).sentence


def test_the_innermost_cause_decides_the_code() -> None:
    outer = ValueError("outer")
    outer.__cause__ = errors.RendezvousError("inner")
    assert exit_codes.code_for_error(outer) == errors.RendezvousError.exit_code
    assert exit_codes.code_for_error(ValueError()) == 1


PROGRAM = """
    import atexit
    from phalanx.runtime import exit_codes, process_exit
    from phalanx import errors
    process_exit.install()
    process_exit.install()
    atexit.register(print, "exit handlers run")
"""


@pytest.mark.parametrize(
    ("raising", "code", "said"),
    [
        ("raise errors.DisagreementError('differ')", 67, "DisagreementError: differ"),
        ("raise ValueError('x') from errors.UnsupportedError('no')", 65, "ValueError: x"),
        ("raise ValueError('x')", 1, "ValueError: x"),
        ("sys.exit(3)", 3, ""),
        ("pass", 0, ""),
    ],
)
def test_a_program_started_by_hand_ends_with_the_errors_code(
    raising: str, code: int, said: str, launcher: Launcher
) -> None:
    job = launcher.python(launcher.script(PROGRAM + f"    {raising}\n"))
    assert job.code == code
    assert job.out == "exit handlers run\n"
    assert job.err.count(said) == 1 or not said
    assert job.err.count("Traceback") == (1 if said else 0)


@pytest.mark.parametrize(
    "first",
    [
        "phalanx.MultiWorkerMirroredStrategy",
        pytest.param("phalanx.experimental.CentralStorageStrategy", marks=pytest.mark.slow),
    ],
)
def test_the_first_use_of_the_package_sets_the_codes(first: str, launcher: Launcher) -> None:
    job = launcher.python(launcher.script(f"import phalanx\n{first}\nraise phalanx.errors.UnsupportedError('no')"))
    assert job.code == 65


def test_a_hook_of_the_users_still_prints(launcher: Launcher, tmp_path: Path) -> None:
    job = launcher.python(
        launcher.script(
            """
            sys.excepthook = lambda kind, error, traceback: print("mine", error)
            from phalanx.runtime import exit_codes, process_exit
            from phalanx import errors
            process_exit.install()
            raise errors.UnsupportedError("no")
            """
        )
    )
    assert (job.code, job.out, job.err) == (65, "mine no\n", "")


def test_the_end_waits_for_no_thread_and_loses_no_file(launcher: Launcher, tmp_path: Path) -> None:
    """A thread may itself be waiting for the peer that is lost."""
    notes, table = tmp_path / "notes.txt", tmp_path / "table"
    start = time.monotonic()
    job = launcher.python(
        launcher.script(
            f"""
            import threading
            from phalanx.runtime import exit_codes, process_exit
            from phalanx import errors
            process_exit.install()
            threading.Thread(target=threading.Event().wait, args=(600,)).start()
            notes = open({str(notes)!r}, "w")
            notes.write("not lost")
            table = open({str(table)!r}, "w+b")
            table.write(b"nor this")
            raise errors.PeerLostError("worker/1 is gone", rank=1, task="worker/1", host="here")
            """
        )
    )
    assert job.code == errors.PeerLostError.exit_code
    assert time.monotonic() - start < 60
    assert notes.read_text() == "not lost"
    assert table.read_text() == "nor this"


def test_an_error_raised_from_itself_has_an_end() -> None:
    error = ValueError("x")
    error.__cause__ = error
    assert exit_codes.code_for_error(error) == 1
    lost = errors.PeerLostError("gone", rank=1, task="worker/1", host="here")
    error.__cause__, lost.__cause__ = lost, error
    assert exit_codes.code_for_error(error) == lost.exit_code


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (-9, "was killed by SIGKILL"),
        (1, "ended with exit code 1"),
        (errors.EvictedError.exit_code, "was evicted"),
        (None, "was lost with its host"),
    ],
)
def test_how_a_task_ended_that_is_started_again(returncode, words):
    assert exit_codes.describe_exit(returncode) == words
