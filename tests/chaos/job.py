"""A real job, as the harness sees it: its launcher, its members, how far they are. `faults` says what is done to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.schedule import MINIMUM, WORKERS
from tests.support.network import Network

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")
MARK = "PHALANX_TEST_MARK"
BATCH, TRAINED = 64, 0.9  # of the samples, the others validate
POLL_S = 0.1
CHECKPOINT_DISK = "1m"
"""Enough for some checkpoints of the digits model, and soon full."""


@dataclass(frozen=True)
class Shape:
    """How large the job is, and how slow.

    Attributes:
        pace_s, hold_s: that each step takes longer; and, growing with each, while a member is missing.
        every: steps between two checkpoints.
    """

    backend: str
    epochs: int = 4
    samples: int = 1437
    pace_s: float = 0.04
    hold_s: float = 0.4
    every: int = 5
    timeout_s: float = 5.0

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_of_an_epoch

    @property
    def steps_of_an_epoch(self) -> int:
        return -(-int(self.samples * TRAINED) // BATCH)


@dataclass
class Member:
    """A process that has made a step, by what it has noted of itself."""

    pid: int
    task: str
    rank: int
    number: int = field(default=0)  # of its host, from 1

    @property
    def lives(self) -> bool:
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class Job:
    """A job in a folder. `start` it, again if its launcher was killed; `close` leaves nothing.

    Args:
        network: hosts of their own for the workers, which are up.
    """

    def __init__(self, folder: Path, shape: Shape, network: Network | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shape, self.network = folder, shape, network
        self.lives, self.checkpoints = folder / "lives", folder / "checkpoints"
        self.temporary, self.registry = folder / "tmp", folder / "jobs"
        for each in (self.lives, self.checkpoints, self.temporary, self.registry):
            each.mkdir(exist_ok=True)
        self.output = folder / "output.log"
        self.ports: set[int] = set()
        self.launchers = 0
        self.mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": str(ROOT),
            "KERAS_BACKEND": shape.backend,
            "PHALANX_TIMEOUT": f"{shape.timeout_s:g}",
            "PHALANX_JOBS": str(self.registry),
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),  # PyTorch's own, which it never removes
        }

    # Its life.

    def start(self) -> None:
        """Start the launcher, for the first time or again."""
        shape = self.shape
        program = [str(PROGRAM), str(self.lives), str(self.checkpoints), "--epochs", str(shape.epochs)]
        program += ["--samples", str(shape.samples), "--pace", str(shape.pace_s), "--hold", str(shape.hold_s)]
        command = [sys.executable, "-m", "phalanx", "run", "-v", "--workers", f"{MINIMUM}:{WORKERS}"]
        command += ["--restarts", "50", "--max-restarts", "5", "--start-timeout", "120"]
        if self.network is not None:
            command += ["--hosts", self.network.slots]
            prefix, variables = self.network.launcher(self.folder)
            self._environment.update(variables)
            command = [*prefix, *command]
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *program, "--every", str(shape.every)],
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launchers += 1

    @property
    def launcher(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code of the launcher; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def close(self) -> None:
        """Kill whatever is left."""
        if self._process is not None:
            self._process.kill()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """All processes of this job that live, its launcher included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def note_ports(self) -> None:
        """Remember on which ports it listens now."""
        for process in self.processes():
            try:
                connections = process.net_connections("inet")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self.ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}

    # How far it is.

    def events(self) -> list[dict[str, Any]]:
        """What all lives have noted, by time; a line that is just being written is left out."""
        found = []
        for path in self.lives.glob("worker-*.log"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    found.append({**json.loads(line), "life": path.stem})
        return sorted(found, key=lambda event: float(event["time"]))

    def steps(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "step"]

    def activity(self) -> list[tuple[float, str]]:
        """When members made a "step", and when they had been "held" up on purpose."""
        return [(float(event["time"]), event["event"]) for event in self.events() if event["event"] in ("step", "held")]

    def reached(self) -> int:
        """The last step that any member has made."""
        steps = self.steps()
        return -1 if not steps else int(steps[-1]["epoch"]) * self.shape.steps_of_an_epoch + int(steps[-1]["step"])

    def members(self) -> list[Member]:
        """Those who take part, by rank: of each life that still runs, what it was at its last step."""
        found: dict[str, Member] = {}
        for event in self.events():
            if event["event"] == "started":
                number = int(event["task"].partition("/")[2]) + 1
                found[event["life"]] = Member(int(event["pid"]), event["task"], -1, number)
            elif event["event"] == "step" and event["life"] in found:
                found[event["life"]].rank = int(event["rank"])
        return sorted((m for m in found.values() if m.rank >= 0 and m.lives), key=lambda m: m.rank)

    def wait_for(self, condition: Callable[[], object], until: float) -> bool:
        """Wait for a condition, the end of the launcher, or a time (`time.monotonic`); whether the condition came."""
        while not condition():
            if self.code is not None or time.monotonic() > until:
                return bool(condition())
            time.sleep(POLL_S)
        return True

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def evictions(self) -> list[str]:
        return re.findall(r"phalanx: (.* was evicted: .*)", self.said())


@contextmanager
def checkpoint_disk(folder: Path) -> Iterator[bool]:
    """A small disk of its own for checkpoints, where one can be mounted; whether it could."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={CHECKPOINT_DISK}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False, timeout=30).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)
