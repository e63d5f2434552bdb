"""The cost of a timeline and the gain of the autotuner: `python -m benchmarks.recording --work mlp64`.

Runs `fit` on two local workers without either, with `--timeline-filename`, and with `--autotune` in turn, so that other
load of the machine affects all of them. The tuner makes its choice within the windows that do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.work import WORKS

JOB_TIMEOUT_S = 300.0
MODES = ("off", "timeline", "autotune")


def run(mode: str, work: str, backend: str, windows: int) -> dict[str, Any]:
    """Run one job, and return the figures of `benchmarks.fit` and the bytes of its timeline."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        trace, result = Path(folder) / "t.json", Path(folder) / "result.json"
        options: Sequence[str] = {
            "off": (),
            "timeline": ("--timeline-filename", str(trace)),
            "autotune": ("--autotune",),
        }[mode]
        launcher = [sys.executable, "-m", "phalanx", "run", "--workers", "2", "--backend", backend, *options]
        program = ["-m", "benchmarks.fit", "--strategy", "MultiWorkerMirroredStrategy"]
        subprocess.run(
            [*launcher, *program, "--work", work, "--windows", str(windows)],
            env=os.environ | {"BENCH_RESULT": str(result)},
            stdout=subprocess.DEVNULL,
            timeout=JOB_TIMEOUT_S,
            check=True,
        )
        figures: dict[str, Any] = json.loads(result.read_text())
        return figures | {"trace_bytes": trace.stat().st_size if trace.exists() else 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=WORKS, default="mlp64")
    parser.add_argument("--backend", choices=("jax", "tensorflow", "torch"), default="jax")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode in MODES:
            found[mode].append(run(mode, args.work, args.backend, args.windows))
    print(f"{args.work} on {args.backend}, 2 workers, {args.rounds} jobs each: ms per step, median (least)\n")
    for mode, jobs in found.items():
        times = [ms for job in jobs for ms in job["ms_per_step"]]
        size = max(job["trace_bytes"] for job in jobs)
        trace = f", trace of {size / 1e6:.1f} MB" if size else ""
        print(f"{mode:10} {statistics.median(times):.3f} ({min(times):.3f}){trace}")


if __name__ == "__main__":
    main()
