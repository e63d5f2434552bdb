"""The accuracy of `phalanx plan`: `python -m benchmarks.plan`, as root, with the `ip` and `tc` commands.

Predicts a step of 2 to 4 workers, then runs it. Links are throttled in two ways: by the kernel, with each worker in a
network namespace (`tc tbf`), and by each worker (PHALANX_SIMULATED_MBITS). The prediction is based on the program's
step on a replica with one core, the software's costs on this machine, and only the rate and latency of the network.

With more workers than cores, workers share cores while they compute. These cases are therefore bound by the link. On a
machine with other load, prefix the command with `chrt -r 1`, which gives its processes priority.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import machine
from benchmarks.run import RESULTS
from phalanx.config.environment_variables import SIMULATED_MBITS
from phalanx.config.plan_request import PlanRequest
from phalanx.launcher.worker_environment import thread_settings
from phalanx.planning.collective_costs import CollectiveCosts, Machines, NetworkLink, SoftwareCosts
from phalanx.planning.collective_trial import measure_costs
from phalanx.planning.examined_program import examine
from phalanx.planning.scaling import ScalingModel, StepPrediction
from phalanx.planning.step_measurement import StepMeasurement
from phalanx.transport.throttle import BURST_S
from tests.support.network import Network

ROOT = Path(__file__).parents[1]
PROGRAM = str(ROOT / "benchmarks" / "plan_program.py")
EPOCHS = 6
REPEATS = 2
"""The fastest repetition counts, for the prediction and the measurement: other programs only slow down both."""
BOUND_S = 300.0
LATENCY_S = 0.00005
"""Between two namespaces of one kernel, measured with ping: 0.05 ms round trip, and the scheduler's share."""
FRAME_EFFICIENCY = 1448 / 1514
"""Payload as a fraction of what `tc tbf` counts. A kernel has no preambles and gaps."""
QUEUE_MS = 1000
"""Deep enough that the kernel drops nothing."""
KERNEL, WORKER = "kernel", "worker"
BAR = 0.10


@dataclass(frozen=True)
class Case:
    """A job to predict and measure.

    Attributes:
        workers: Number of workers, each on its own host.
        mbits: Maximum megabits per second that each host receives, or that each worker sends.
        width: Width of the MLP's layers.
        batch: Global batch.
        throttle: What limits the link, `KERNEL` or `WORKER`.
    """

    workers: int
    mbits: float
    width: int
    batch: int
    throttle: str

    @property
    def arguments(self) -> tuple[str, ...]:
        return str(self.width), str(self.batch), str(EPOCHS)


CASES = (
    *(Case(workers, 100, 256, 64, KERNEL) for workers in (2, 3, 4)),
    *(Case(workers, 100, 256, 64, WORKER) for workers in (2, 3, 4)),
    *(Case(workers, 200, 1024, 64, WORKER) for workers in (2, 3, 4)),
    Case(2, 200, 512, 4096, WORKER),
)


@dataclass(frozen=True)
class Outcome:
    """Predicted and measured seconds per step, in the fastest epoch."""

    case: Case
    predicted: StepPrediction
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted.step_s / self.measured_s - 1


def settings() -> dict[str, str]:
    return {**os.environ, **thread_settings(1), "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)}


def predict(case: Case, software: SoftwareCosts) -> StepPrediction:
    """Predict a step as `phalanx plan` does."""
    efficiency = FRAME_EFFICIENCY if case.throttle == KERNEL else 1.0
    link = NetworkLink(case.mbits * 1e6 / 8 * efficiency, LATENCY_S)
    measurements = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            request = PlanRequest(Path(folder) / "measurement", case.workers)
            measurements.append(
                examine([PROGRAM, *case.arguments], request, StepMeasurement, settings(), BOUND_S, cores=[first_core()])
            )
    measurements = [min(measurements, key=lambda each: each.computed_s)]
    step = ScalingModel(measurements, CollectiveCosts(link, software)).predict(Machines(case.workers))
    if case.throttle == WORKER:  # which sends at once what it could have sent while the worker computed
        step = replace(step, merged_s=step.merged_s - min(BURST_S, step.computed_s))
    return step


def measure(case: Case) -> float:
    """Measure the seconds per step of the real job."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        run = [sys.executable, "-m", "phalanx", "run", "--log-dir", str(folder / "logs")]
        if case.throttle == KERNEL:
            network = stack.enter_context(Network(case.workers))
            for host in range(1, case.workers + 1):
                network.slow(host, case.mbits, QUEUE_MS)
            prefix, variables = network.launcher(folder)
            run = [*prefix, *run, "--hosts", network.slots]
        else:
            variables = {SIMULATED_MBITS: str(case.mbits)}
            run += ["--workers", str(case.workers)]
        done = subprocess.run(
            [*run, PROGRAM, *case.arguments, str(folder)],
            env=settings() | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
        )
        if done.returncode:
            raise RuntimeError(f"{case}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return min(json.loads((folder / "epochs.json").read_text()))


def first_core() -> int:
    return min(os.sched_getaffinity(0))


def table(outcomes: list[Outcome]) -> str:
    lines = [
        "| workers | link | throttled by | weights, batch | computes | merges | predicted | measured | error |",
        "|---:|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for each in outcomes:
        case, step = each.case, each.predicted
        milliseconds = (step.computed_s, step.merged_s, step.step_s, each.measured_s)
        cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds in milliseconds)
        model = f"{weights(case.width) / 1e6:.2f} M, {case.batch:,}"
        link = f"{case.mbits:g} Mbit/s | {case.throttle}"
        lines.append(f"| {case.workers} | {link} | {model} | {cells} | {each.error:+.1%} |")
    return "\n".join(lines)


def weights(width: int) -> int:
    return 784 * width + width + width * width + width + width * 10 + 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run, from 0")
    parser.add_argument("--save", action="store_true", help="write the report to benchmarks/results")
    options = parser.parse_args()
    if problem := Network.problem():
        sys.exit(problem)
    found = machine.describe(sorted(os.sched_getaffinity(0))[:2])
    software = measure_costs(encrypted=True)
    outcomes = []
    for number in options.only if options.only is not None else range(len(CASES)):
        case = CASES[number]
        outcomes.append(Outcome(case, predict(case, software), measure(case)))
        print(table(outcomes[-1:]).splitlines()[-1], flush=True)
    within = sum(abs(each.error) <= BAR for each in outcomes)
    report = (
        f"# Predicted and measured steps, {datetime.date.today()}\n\n{found['processor']}, 2 cores, Keras on JAX; ms "
        f"per step, of the fastest epoch; load before: {found['load_before']}.\n\n"
        f"{table(outcomes)}\n\n{within} of {len(outcomes)} within {BAR:.0%}. {software}\n"
    )
    print(report)
    if options.save:
        (RESULTS / f"{datetime.date.today()}-plan.md").write_text(report)


if __name__ == "__main__":
    main()
