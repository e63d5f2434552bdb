"""The time that a killed worker costs the others: `make bench-recovery`, or `python -m benchmarks.recovery`.

Three workers train on digits; one is killed (-9) at a random moment. Measures the time from the kill to the next
optimizer step on the others. With `--torchrun`, also measures this for PyTorch's DDP under `torchrun --max-restarts`,
which restarts all workers, and the steps that it then repeats, because its program keeps no checkpoint.

Also measures how soon a replacement takes part: from its start to its first step, compared with a process that trains
alone on the same core while the others train. The time that the others wait for it is the longest time between two of
their steps.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks import job, machine

HERE = Path(__file__).parent
PROGRAM = HERE / "recovery_program.py"
PEER = HERE / "peers" / "ddp_elastic.py"
WORKERS = 3
SETTLED_S = 1.5
"""Wait after the first step and after each kill. Background compilation has ended by then."""
BOUND_S = 120.0


@dataclass(frozen=True)
class Kill:
    """Result of one kill.

    Attributes:
        tool: `phalanx` with its backend, or `torchrun`.
        left: Number of remaining workers.
        seconds: Seconds until the next step.
    """

    tool: str
    left: int
    seconds: float


@dataclass(frozen=True)
class Replacement:
    """A process that replaced a killed one.

    Attributes:
        seconds: Seconds from its start to its first step.
        alone_s: The same for a process that trains alone while the others train.
        pause_s: Longest time between two steps of the others, from its start to its tenth step.
    """

    tool: str
    seconds: float
    alone_s: float
    pause_s: float


def steps(folder: Path) -> dict[str, list[float]]:
    """Return the times of all steps so far, by process (`pid.log`)."""
    return {log.stem: [float(line) for line in log.read_text().split()] for log in folder.glob("*.log")}


def kill_and_wait(folder: Path, victim: str) -> float:
    """Kill a process, and return the seconds until the next step of another process."""
    before = time.time()
    os.kill(int(victim), signal.SIGKILL)
    until = before + BOUND_S
    while time.time() < until:
        later = [t for pid, times in steps(folder).items() if pid != victim for t in times if t > before]
        # A step that was almost complete at the time of the kill was not taken without the victim.
        later = [t for t in later if t > before + 0.002]
        if later:
            return min(later) - before
        time.sleep(0.005)
    raise TimeoutError(f"no step within {BOUND_S} s after the kill")


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + BOUND_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the job did not begin")
        time.sleep(0.02)


@contextlib.contextmanager
def training(command: Sequence[str], environment: dict[str, str]) -> Iterator[Path]:
    """Context manager with a job of three workers that are taking steps; yields the folder of their step times."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        process = subprocess.Popen(
            [*command, str(folder)],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_for(lambda: sum(len(times) >= 3 for times in steps(folder).values()) == WORKERS)
            yield folder
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)


def one_job(command: Sequence[str], tool: str, environment: dict[str, str], kills: int) -> list[Kill]:
    """Run a job of three workers, and kill `kills` of them one after another."""
    found = []
    with training(command, environment) as folder:
        left = WORKERS
        alive = set(steps(folder))
        for _ in range(kills):
            time.sleep(SETTLED_S + random.random())
            victim = random.choice(sorted(alive))
            alive.discard(victim)
            left -= 1
            found.append(Kill(tool, left, kill_and_wait(folder, victim)))
    return found


def replacement(tool: str, environment: dict[str, str]) -> Replacement:
    """Measure how soon a replacement takes part."""
    with training(phalanx("--restarts", "0"), environment) as folder:
        time.sleep(SETTLED_S)
        victim = psutil.Process(max(map(int, steps(folder))))  # the one on the same cores in both jobs
        cores = victim.cpu_affinity()
        victim.kill()
        time.sleep(SETTLED_S)
        with tempfile.TemporaryDirectory() as apart:
            started = time.time()
            alone = subprocess.Popen(
                [sys.executable, str(PROGRAM), apart],
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),  # as the launcher binds a worker
            )
            try:
                wait_for(lambda: any(steps(Path(apart)).values()))
                alone_s = steps(Path(apart))[str(alone.pid)][0] - started
            finally:
                alone.kill()
                alone.wait()
    with training(phalanx("--restarts", "10"), environment) as folder:
        time.sleep(SETTLED_S)
        victim = psutil.Process(max(map(int, steps(folder))))
        others = set(steps(folder)) - {str(victim.pid)}
        victim.kill()

        def newcomers() -> list[str]:
            return [pid for pid, times in steps(folder).items() if pid not in before and len(times) > 10]

        before = {*others, str(victim.pid)}
        wait_for(newcomers)
        (pid,) = newcomers()
        began = psutil.Process(int(pid)).create_time()
        all_steps = steps(folder)
        until = all_steps[pid][9]
        pauses = [
            later - earlier
            for other in others
            for earlier, later in itertools.pairwise(t for t in all_steps[other] if began <= t <= until)
        ]
    return Replacement(tool, all_steps[pid][0] - began, alone_s, max(pauses))


def phalanx(*options: str) -> list[str]:
    """Return the command of a Phalanx job."""
    return [sys.executable, "-m", "phalanx", "run", "--workers", f"1:{WORKERS}", *options, str(PROGRAM)]


def line(kills: Sequence[Kill]) -> str:
    if not kills:
        return "none"
    times = sorted(kill.seconds for kill in kills)
    return f"{statistics.median(times):.3f} ({times[0]:.3f} to {times[-1]:.3f}), {len(times)} kills"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--replacements", type=int, default=5)
    parser.add_argument("--backends", default="jax,tensorflow,torch")
    parser.add_argument("--torchrun", metavar="PATH", help="of the torchrun to compare with")
    parser.add_argument("--name", default=f"{datetime.date.today()}-recovery")
    options = parser.parse_args()
    kills: list[Kill] = []
    failures: list[str] = []
    replacements: list[Replacement] = []
    for backend in options.backends.split(","):
        tool = f"phalanx, {backend}"
        environment = {"KERAS_BACKEND": backend}
        while sum(kill.tool == tool for kill in kills) < options.kills:
            kills += one_job(phalanx("--restarts", "0"), tool, environment, WORKERS - 1)
        print(tool, line([kill for kill in kills if kill.tool == tool]), flush=True)
        for _ in range(options.replacements):
            replacements.append(replacement(tool, environment))
            print(replacements[-1], flush=True)
    if options.torchrun:
        command = [
            options.torchrun, "--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=3", str(PEER)
        ]  # fmt: skip
        while sum(kill.tool == "torchrun" for kill in kills) < max(5, options.kills // 4):
            try:
                kills += one_job(command, "torchrun", {"OMP_NUM_THREADS": "1"}, 1)
            except TimeoutError as error:  # some versions of gloo dial the addresses of lost workers
                failures.append(f"torchrun --max-restarts: {error}")
                break
        print("torchrun", line([kill for kill in kills if kill.tool == "torchrun"]), flush=True)
    report(kills, replacements, failures, options.name)


def table(replacements: Sequence[Replacement]) -> list[str]:
    """Render medians with minimum and maximum."""
    if not replacements:
        return []

    def cell(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    lines = [
        "",
        "From the start of the one in its place to its first step, in seconds; of a process by itself beside the same "
        "others; and the longest time between two steps of the others meanwhile.",
        "",
        "| | takes part after | by itself | longest pause of the others |",
        "|---|---|---|---|",
    ]
    for tool in dict.fromkeys(each.tool for each in replacements):
        own = [each for each in replacements if each.tool == tool]
        figures = [[each.seconds for each in own], [each.alone_s for each in own], [each.pause_s for each in own]]
        lines.append(f"| {tool}, {len(own)} times | {' | '.join(map(cell, figures))} |")
    return lines


def report(kills: Sequence[Kill], replacements: Sequence[Replacement], failures: Sequence[str], name: str) -> None:
    results = HERE / "results"
    tools = list(dict.fromkeys(kill.tool for kill in kills))
    rows = [f"| {tool} | {line([kill for kill in kills if kill.tool == tool])} |" for tool in tools]
    host = machine.describe(job.available_cores())
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions(sys.executable).items())
    text = "\n".join(
        [
            f"# From a kill to the next step, {datetime.date.today()}",
            "",
            f"{host['processor']}, {host['cores_used']} cores. Versions: {versions}.",
            f"{WORKERS} workers train on digits, one is killed. Seconds to the next step of the others, median (min to "
            f"max).",
            "",
            "| | s |",
            "|---|---|",
            *rows,
            *table(replacements),
            "",
            *failures,
        ]
    )
    (results / f"{name}.md").write_text(text)
    figures = {"kills": [asdict(each) for each in kills], "replacements": [asdict(each) for each in replacements]}
    (results / f"{name}.json").write_text(json.dumps(figures, indent=1))
    print(text)


if __name__ == "__main__":
    main()
