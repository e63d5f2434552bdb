"""Chaos for as long as it is told: one job after another, each with faults of its own.

    python -m tests.chaos.run --seconds 600 --seed 1 --backend jax

Prints a line for each job. The exit code is 1 if anything did not hold; then the line says how to repeat it, and the
folder of that job stays.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import faults
from tests.chaos.job import Shape
from tests.chaos.schedule import Kind, plan
from tests.chaos.trial import trial, undisturbed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description="Chaos over real jobs.")
    parser.add_argument("--seconds", type=float, default=600.0, help="no job begins after so many seconds")
    parser.add_argument("--jobs", type=int, help="so many jobs instead")
    parser.add_argument("--seed", type=int, default=1, help="of the first job; the next has the next one")
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--faults", type=int, default=5, help="in each job")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=5.0, help="PHALANX_TIMEOUT of the jobs, in seconds")
    parser.add_argument("--only", help="kinds of faults, separated by commas")
    parser.add_argument("--folder", type=Path, help="for what the jobs write; else a temporary one")
    options = parser.parse_args()
    able = faults.able()
    if missing := sorted(set(Kind) - able):
        print(f"cannot be done on this machine: {', '.join(missing)}")
    if options.only:
        able &= {Kind(name) for name in options.only.split(",")}
    shape = Shape(options.backend, epochs=options.epochs, timeout_s=options.timeout)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    reference = undisturbed(folder / "undisturbed", shape)
    failed = 0
    began, count = time.monotonic(), 0
    while (count < options.jobs) if options.jobs else (time.monotonic() < began + options.seconds):
        seed = options.seed + count
        count += 1
        own = folder / f"seed-{seed}"
        shutil.rmtree(own, ignore_errors=True)
        chosen = plan(seed, steps=shape.steps, faults=options.faults, able=able, timeout_s=shape.timeout_s)
        verdict = trial(own, shape, chosen, reference)
        print(verdict, flush=True)
        if verdict.violations:
            failed += 1
            again = f"python -m tests.chaos.run --jobs 1 --seed {seed} --backend {options.backend}"
            again += f" --faults {options.faults} --epochs {options.epochs} --timeout {options.timeout:g}"
            again += f" --only {options.only}" if options.only else ""
            print(f"  planned: {', '.join(map(str, chosen.faults))}\n  log: {own / 'output.log'}\n  again: {again}")
        else:
            shutil.rmtree(own)
    if not failed and options.folder is None:
        shutil.rmtree(folder)
    print(f"{count} jobs, {failed} with something that did not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
