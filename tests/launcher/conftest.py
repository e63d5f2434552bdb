"""Real jobs for tests: started through the command line, bounded, and proven to leave no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
# Bounds against hanging only: a loaded machine may take most of this.
JOB_BOUND_S = 60.0
MARK = "PHALANX_TEST_MARK"


@dataclass
class Launched:
    """A job that has ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Launcher:
    """Starts jobs; `environment` is what they run in."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT), "PHALANX_GRACE": "1"}
        # Of a terminal that tests run in, not of the one they make: COLUMNS and LINES.
        for name in ("TF_CONFIG", "PHALANX_SECRET", "PHALANX_JOB_ID", "OMP_NUM_THREADS", "COLUMNS", "LINES"):
            self.environment.pop(name, None)

    def script(self, code: str, name: str = "program.py") -> str:
        """Write a program; `rank` and `wait_for(file)` are at its hand."""
        path = self.folder / name
        path.write_text(PRELUDE + textwrap.dedent(code))
        return str(path)

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        """`python *arguments` in the test's folder, in its own session."""
        settings: dict[str, object] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "cwd": self.folder,
            "env": self.environment,
            "start_new_session": True,
            **options,
        }
        return self.popen([sys.executable, *arguments], **settings)

    def python(self, *arguments: str, **options: object) -> Launched:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=JOB_BOUND_S)
        return Launched(process.returncode, out or "", err or "")

    def run(self, *arguments: str, **options: object) -> Launched:
        """`phalanx run *arguments`, to its end."""
        return self.python("-m", "phalanx", "run", *arguments, **options)

    def start_run(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        return self.start("-m", "phalanx", "run", *arguments, **options)

    def processes(self) -> list[psutil.Process]:
        """The processes of this test that still run (zombies of a lazy init do not). A fork, which shows its template's
        environment, is known by its folder."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(MARK) == self.mark or process.cwd() == str(self.folder)
                marked = process.pid != os.getpid() and is_ours
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def assert_all_gone(self) -> None:
        """All processes of this test end by themselves within a bound; those that do not are named."""
        wait_until(lambda: not self.processes(), lambda: f"still running: {self.processes()}")


PRELUDE = """
import json, os, sys, time
from pathlib import Path
rank = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0)
def wait_for(name, bound_s=60):
    deadline = time.monotonic() + bound_s
    while not Path(name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        time.sleep(0.01)
def touch(name):
    Path(f"{name}.{os.getpid()}").write_text(str(os.getpid()))
    os.replace(f"{name}.{os.getpid()}", name)  # complete as soon as it is visible
def hang():
    time.sleep(1000)
"""


def wait_until(condition: Callable[[], object], message: Callable[[], str] = lambda: "", bound_s: float = 60.0) -> None:
    deadline = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {bound_s} s. {message()}")
        time.sleep(0.01)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    try:
        yield launcher
        launcher.assert_all_gone()
    finally:
        for process in launcher.processes():
            process.kill()
