"""A forked program cannot tell that it was not started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.backends import FIRST, slow_after_the_first
from tests.support.commands import ROOT, die_with_parent
from tests.support.programs import environment

BOUND_S = 100.0
Start = Callable[..., "subprocess.Popen[str]"]

DESCRIBE = """
import json, os, signal, sys
names = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
print(json.dumps({
    "name": __name__, "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path[0], "folder": os.getcwd(),
    "parent": os.getppid(), "session": os.getsid(0) == os.getpid(), "group": os.getpgrp() == os.getpid(),
    "variable": os.environ.get("A_VARIABLE"), "python_path": [p for p in sys.path if "some folder" in p],
    "descriptors": len(names), "threads": len(os.listdir("/proc/self/task")),
    "backend": os.environ["KERAS_BACKEND"], "hook": sys.excepthook is sys.__excepthook__,
    "handlers": [str(signal.getsignal(n)) for n in range(1, 32)],
    "unbuffered": sys.stdout.write_through, "line_buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
}))
"""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def of(*arguments: str, real: bool = False, backend: str = FIRST, **options: Any) -> subprocess.Popen[str]:
        settings = {**environment(backend), **options.pop("variables", {})}
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        popen = subprocess.Popen if real else fork_server.popen
        return popen([sys.executable, *arguments], env=settings, text=True, **given)

    return of


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=BOUND_S)
    return process.returncode, output


@pytest.mark.parametrize("backend", slow_after_the_first())
def test_it_finds_what_a_started_one_finds(start: Start, tmp_path: Path, backend: str) -> None:
    (tmp_path / "described.py").write_text(DESCRIBE)
    of_keras = f"import keras; assert keras.backend.backend() == {backend!r}"
    (tmp_path / "with_keras.py").write_text(f"{of_keras}\n{DESCRIBE}")
    options = {
        "variables": {"A_VARIABLE": "value", "PYTHONPATH": os.pathsep.join(["/some folder", str(ROOT)])},
        "cwd": tmp_path,
        "start_new_session": True,
        "backend": backend,
    }
    for arguments in (["with_keras.py", "a", "b c"], ["-m", "described", "x"], ["-c", DESCRIBE, "-m", "y"]):
        forked, started = (ended(start(*arguments, real=real, **options)) for real in (False, True))
        assert forked[0] == started[0] == 0, forked
        found, expected = (json.loads(output.splitlines()[-1]) for _, output in (forked, started))
        assert found.pop("threads") == 1
        expected.pop("threads")
        assert found == expected
        assert found["backend"] == backend
        assert found["parent"] == os.getpid()


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a message')",
        "raise SystemExit",
        "def f(): 1 / 0\nf()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'last words'); print('first', end=' ')",
        "import threading; threading.Timer(0.2, lambda: print('late')).start(); print('main')",
        "file = open('/proc/self/fd/1', 'w'); file.write('left open')",
        "import sys; sys.excepthook = lambda *error: print('hook', error[0]); raise ValueError",
    ],
)
def test_it_ends_as_a_started_one_does(start: Start, program: str) -> None:
    variables = {"PYTHONUNBUFFERED": "1"}
    forked, started = (ended(start("-c", program, real=real, variables=variables)) for real in (False, True))
    assert forked == started


def test_it_is_a_child_to_be_signalled_and_waited_for(start: Start) -> None:
    process = start("-c", "import time; print('runs', flush=True); time.sleep(1000)")
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    assert process.poll() is None
    process.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    process.kill()
    assert ended(process)[0] == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_descriptors_are_passed_under_their_numbers(start: Start) -> None:
    here, there = socket.socketpair()
    with here, there:
        program = f"import socket; socket.socket(fileno={there.fileno()}).sendall(b'received')"
        assert ended(start("-c", program, pass_fds=[there.fileno()])) == (0, "")
        assert here.recv(100) == b"received"


def test_forks_draw_other_random_numbers(start: Start) -> None:
    program = "import random, numpy; print(random.random(), numpy.random.rand())"
    first, second = (ended(start("-c", program))[1].split() for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_what_an_import_reads_is_never_that_of_another_environment(start: Start) -> None:
    program = "print(open('/proc/self/cmdline').read().split(chr(0))[1])"
    assert ended(start("-c", program))[1] == "-m\n", "of the template"
    assert ended(start("-c", program, variables={"KERAS_HOME": "/elsewhere"}))[1] == "-c\n"
    assert ended(start("-c", program, variables={"PYTHONHASHSEED": "1"}))[1] == "-c\n"


def test_it_dies_with_the_process_that_started_it(start: Start) -> None:
    # Each line in one piece: two processes write them.
    child = "import time; print('runs\\n', end='', flush=True); time.sleep(1000)"
    program = (
        "import subprocess, sys, time; from tests.support.commands import ROOT, die_with_parent\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], preexec_fn=die_with_parent)\n"
        "print(f'{child.pid}\\n', end='', flush=True); time.sleep(1000)"
    )
    process = start("-c", program, starts_others=True, preexec_fn=die_with_parent)
    assert process.stdout is not None
    lines = {process.stdout.readline().strip() for _ in range(2)}
    (pid,) = map(int, lines - {"runs"})
    assert "fork_template" in Path(f"/proc/{pid}/cmdline").read_text()
    process.kill()
    process.wait()
    until = time.monotonic() + BOUND_S
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert process.stdout.read() == ""
