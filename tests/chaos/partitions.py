"""Cuts the network of a job into two parts, at a moment and for a time that follow from a seed.

    python -m tests.chaos.partitions --seeds 20 [--first 0] [--kind launcher|chief] [--at-once 4]

No root is needed: `cable` carries what hosts send each other. Whatever the parts do, at no time do two processes write
checkpoints to one directory; no saved step is lost; a part without the launcher ends within `ENDS_WITHIN_S`; the other
one trains on. The exit code is 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
MARK = "PHALANX_TEST_MARK"
CABLE, MEMBER = (Path(__file__).with_name(name) for name in ("cable.py", "partition_member.py"))
WORKERS = 3
ENDS_WITHIN_S = 25.0
"""What the documentation says of members and agents that the launcher does not reach."""
SLACK_S = 15.0
"""For a busy machine."""
BOUND_S = 240.0


class Kind(enum.StrEnum):
    """What is on both sides of the cut."""

    LAUNCHER = "launcher"
    """{launcher} | {all members}"""
    CHIEF = "chief"
    """{launcher, some} | {others}: the chief, which saves, is among the others."""


@dataclass(frozen=True)
class Plan:
    """What a seed stands for: after which step the network is cut, and for how many seconds."""

    seed: int
    kind: Kind
    step: int
    lasts_s: float

    @classmethod
    def of(cls, seed: int, kind: Kind) -> Plan:
        chance = random.Random(f"{kind} {seed}")
        lasts_s = chance.choice([chance.uniform(0.2, 3.0), chance.uniform(3.0, 20.0), chance.uniform(25.0, 45.0)])
        return cls(seed, kind, chance.randint(3, 40), round(lasts_s, 1))

    def __str__(self) -> str:
        return f"{self.kind} seed {self.seed}, cut after step {self.step} for {self.lasts_s:g} s"


class Job:
    """A job whose hosts can be cut off; `close` leaves nothing."""

    def __init__(self, folder: Path, number: int):
        self.folder, self._mark = folder, uuid.uuid4().hex
        self.hosts = [f"127.0.{number}.{host}" for host in range(2, 2 + WORKERS)]
        self.output = folder / "output.log"
        environment = {
            **os.environ,
            MARK: self._mark,
            "PYTHONPATH": str(ROOT),
            "CABLES": str(folder),
            "PHALANX_TIMEOUT": "3",
            "PHALANX_SSH": f"{sys.executable} {CABLE}",
            "PHALANX_JOBS": str(folder / "jobs"),
        }
        options = ["--workers", f"1:{WORKERS}", "--hosts", ",".join(f"{host}:1" for host in self.hosts)]
        options += ["--max-restarts", "5", "--restarts", "20", "--start-timeout", "120", "-v"]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "phalanx", "run", *options, str(MEMBER), str(folder)],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def writes(self) -> list[dict[str, Any]]:
        path = self.folder / "writes"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def step(self) -> int:
        return max((write["step"] for write in self.writes() if write["what"] == "end"), default=0)

    def cut(self, hosts: list[str], *, side: bool) -> None:
        for host in hosts:
            (self.folder / f"{host}.cut").touch()
            for pid in self._cables(host, side=side):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    def mend(self) -> None:
        for host in self.hosts:
            (self.folder / f"{host}.cut").unlink(missing_ok=True)
            for pid in self._cables(host, side=True):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _cables(self, host: str, *, side: bool) -> list[int]:
        files = [self.folder / f"{host}.{which}" for which in (["up", "side"] if side else ["up"])]
        return [int(line) for path in files if path.exists() for line in path.read_text().split()]

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        self.mend()
        for process in [self.process, *self.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self.process.wait()


def trial(folder: Path, plan: Plan, number: int = 0) -> list[str]:
    """Run one job; what did not hold.

    Args:
        number: differs between trials that run at the same time.
    """
    job = Job(folder, number)
    until = time.monotonic() + BOUND_S

    def wait_for(condition: Callable[[], object]) -> bool:
        while not condition():
            if time.monotonic() > until or job.process.poll() is not None:
                return False
            time.sleep(0.1)
        return True

    try:
        if not wait_for(lambda: job.step() >= plan.step and job.writes()[-1]["members"] == WORKERS):
            return ["the job did not begin"]
        chiefs = job.writes()[-1]["host"]
        began = time.time()
        job.cut(job.hosts if plan.kind is Kind.LAUNCHER else [chiefs], side=plan.kind is Kind.CHIEF)
        time.sleep(plan.lasts_s)
        job.mend()
        mended = job.step()
        if not wait_for(lambda: time.time() > began + ENDS_WITHIN_S + SLACK_S and job.step() > mended + 20):
            return [f"nothing was saved after step {job.step()}; exit code {job.process.poll()}"]
        (folder / "stop").touch()
        wait_for(lambda: job.process.poll() is not None)
        found = violations(job.writes(), began if plan.lasts_s > ENDS_WITHIN_S else None)
        if job.process.poll() != 0:
            found.append(f"exit code {job.process.poll()}")
        for _ in range(50):
            if not (left := job.processes()):
                break
            time.sleep(0.2)
        return [*found, *([f"processes are left: {left}"] if left else [])]
    finally:
        job.close()


def violations(writes: list[dict[str, Any]], cut_at: float | None = None) -> list[str]:
    """What does not hold of all saves, in the order of the file.

    Args:
        cut_at: when the network was cut, if that lasted longer than a part may live without the launcher.
    """
    found = []
    for before, write in zip([{"what": "end", "step": 0, "token": [0, 0], "pid": 0}, *writes], writes, strict=False):
        if write["what"] == before["what"] or (write["what"] == "end" and write["pid"] != before["pid"]):
            killed = before["what"] == write["what"] == "begin" and not psutil.pid_exists(before["pid"])
            if not killed:
                found.append(f"two writers at once: {before} and {write}")
        if write["token"] < before["token"]:
            found.append(f"{write} after a later one, {before}")
        if write["step"] < before["step"]:
            found.append(f"the saved step {before['step']} is lost: {write}")
    first = [write["token"][0] for write in writes][:1]
    late = [w for w in writes if cut_at and w["token"][0] == first[0] and w["time"] > cut_at + ENDS_WITHIN_S + SLACK_S]
    if cut_at and late and writes[-1]["token"][0] != first[0]:
        found.append(f"a process without the launcher trained for too long: {late[-1]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.partitions", description="Partitions of real jobs.")
    parser.add_argument("--seeds", type=int, default=20, help="of each kind")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=list(Kind), action="append")
    parser.add_argument("--at-once", type=int, default=4, help="jobs that run at the same time")
    options = parser.parse_args()
    plans = [
        Plan.of(seed, Kind(kind))
        for seed in range(options.first, options.first + options.seeds)
        for kind in options.kind or Kind
    ]
    failed = 0

    def run(numbered: tuple[int, Plan]) -> None:
        nonlocal failed
        number, plan = numbered
        folder = Path(tempfile.mkdtemp(prefix="partition-"))
        found = trial(folder, plan, number % 250)
        failed += bool(found)
        print(f"{plan}: {'; '.join(found) + f'; see {folder}' if found else 'ok'}", flush=True)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(run, enumerate(plans)))
    print(f"{len(plans)} partitions, {failed} with something that did not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
