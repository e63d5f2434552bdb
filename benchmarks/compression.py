"""The gains and costs of training with fewer bytes: `python -m benchmarks.compression`.

Three questions, each answered by a table. How many steps per second does the character model (`examples/char_lm.py`)
take over a simulated 100 Mbit/s link with each compression? How close to uncompressed training do the character model
and the digits get? What does DiLoCo with 50 inner steps send and reach, compared with synchronous training?

The figures of every job are kept in the folder `--work`, so that an interrupted run can resume.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.run import RESULTS

ROOT = Path(__file__).parents[1]
MBITS = 100
NO_LIMIT = 1e6
"""Mbit/s. Still uses links, so that the bytes are those that a network would carry."""
COMPRESSIONS = ("none", "float16", "bfloat16", "int8", "int6", "int4", "top_k", "power_sgd")
BACKEND = "jax"
SEEDS = (1, 2, 3)

# The bars, relative to uncompressed training: its steps/s, the result that it reaches, its bytes.
SPEED_BARS = {"int8": 3.0, "power_sgd": 8.0}
NEAR = 0.005
DILOCO_BYTES, DILOCO_LOSS = 0.03, 0.03

CHAR_LM = ("examples/char_lm.py", "--verbose", "0", "--learning-rate", "1e-3")
# 128 characters per process and step. With more, a step computes longer, and all compressions gain less.
FEW = ("--batch-size", "4")
SPEED = (*FEW, "--strategies", "plain", "--epochs", "4", "--steps", "12")
SPEED_OF_DILOCO = (*FEW, "--epochs", "2", "--steps", "50")
SHORT, LONG = ("--epochs", "15"), ("--epochs", "50")
DILOCO = ("--strategies", "diloco", "--outer-learning-rate", "0.8", "--outer-momentum", "0.65")


@dataclass(frozen=True)
class Bench:
    """The store of figures, and whether to measure missing ones."""

    work: Path
    may_run: bool

    def char_lm(self, name: str, arguments: Sequence[str], *, mbits: float | None = None) -> dict[str, Any] | None:
        """Return the curve of one training run of the character model; None if it is missing and may not be
        measured."""
        folder = self.work / name
        path = folder / "char_lm.json"
        if not path.exists():
            if not self.may_run:
                return None
            self._run(name, [*CHAR_LM, "--out", str(folder), *arguments], mbits)
        curve: dict[str, Any] = json.loads(path.read_text())[0]
        return curve

    def digits(self, compression: str, seed: int) -> float | None:
        """Return the accuracy on held-out digits in percent."""
        name = f"digits-{compression}-{seed}"
        log = self.work / f"{name}.log"
        if not log.exists() or "test accuracy" not in log.read_text():
            if not self.may_run:
                return None
            chosen = () if compression == "none" else ("--compression", compression)
            out = ("--out", str(self.work / name))
            self._run(name, ["examples/digits.py", "--verbose", "0", "--seed", str(seed), *out, *chosen], None)
        found = re.search(r"test accuracy ([\d.]+)%", log.read_text())
        assert found is not None, log
        return float(found[1])

    def _run(self, name: str, program: Sequence[str], mbits: float | None) -> None:
        print(f"{datetime.datetime.now():%H:%M:%S} {name}", flush=True)
        environment = {**os.environ, "KERAS_BACKEND": BACKEND, "PYTHONPATH": str(ROOT)}
        if mbits is not None:
            environment["PHALANX_SIMULATED_MBITS"] = str(mbits)
        self.work.mkdir(parents=True, exist_ok=True)
        with open(self.work / f"{name}.log", "w") as log:
            command = [sys.executable, "-m", "phalanx", "run", "--workers", "2", *program]
            subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True, timeout=3600)


def speeds(bench: Bench, rounds: int, ways: Sequence[str]) -> dict[str, list[float]]:
    """Measure steps per second of the least disturbed epoch, by compression and round. All take turns in a round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in ways:
            chosen = SPEED if name == "none" else (*SPEED, "--compression", name)
            if name == "diloco":
                chosen = (*SPEED_OF_DILOCO, *DILOCO)  # with one exchange per epoch
            curve = bench.char_lm(f"speed-{name}-{number}", chosen, mbits=MBITS)
            if curve is not None:
                totals = [0.0, *curve["seconds"]]
                shortest = min(b - a for a, b in itertools.pairwise(totals))
                found[name].append(curve["steps"][0] / shortest)
    return found


def speed_table(found: dict[str, list[float]]) -> list[str]:
    lines = ["| compression | steps/s | times uncompressed | bar |", "|---|---|---|---|"]
    for name, figures in found.items():
        if figures and found["none"]:
            ratios = [own / plain for own, plain in zip(figures, found["none"], strict=False)]
            bar = SPEED_BARS.get(name)
            said = "" if bar is None else f"{bar:g}: {'met' if statistics.median(ratios) >= bar else 'missed'}"
            spread = f"{min(figures):.2f} to {max(figures):.2f}"
            lines.append(
                f"| {name} | {statistics.median(figures):.2f} ({spread}) | {statistics.median(ratios):.2f} | {said} |"
            )
    return lines


def accuracy_table(bench: Bench) -> list[str]:
    """Render means over the seeds. A single training run of the character model may deviate by half a percent."""
    curves = {name: [bench.char_lm(*_short(name, seed), mbits=NO_LIMIT) for seed in SEEDS] for name in COMPRESSIONS}
    digits = {name: [bench.digits(name, seed) for seed in SEEDS] for name in COMPRESSIONS}
    losses = {name: [curve["losses"][-1] for curve in found if curve] for name, found in curves.items()}
    accuracies = {name: [value for value in found if value] for name, found in digits.items()}
    lines = [
        "| compression | characters: held-out loss | beside none | MB sent | digits: accuracy | beside none |",
        "|---|---|---|---|---|---|",
    ]
    for name in COMPRESSIONS:
        sent = [curve["megabytes"][-1] for curve in curves[name] if curve]
        megabytes = f"{statistics.mean(sent):,.0f}" if sent else ""
        characters = _beside(losses[name], losses["none"], "{:.4f}")
        lines.append(
            f"| {name} | {characters} | {megabytes} | {_beside(accuracies[name], accuracies['none'], '{:.2f} %')} |"
        )
    return lines


def _short(name: str, seed: int) -> tuple[str, list[str]]:
    chosen = [] if name == "none" else ["--compression", name]
    return f"short-{name}-{seed}", [*SHORT, "--strategies", "plain", "--seed", str(seed), *chosen]


def _beside(found: Sequence[float], plain: Sequence[float], form: str) -> str:
    """Render two cells: the mean with minimum and maximum, and its difference from uncompressed training."""
    if len(found) < len(SEEDS) or len(plain) < len(SEEDS):
        return "| "
    mean = statistics.mean(found)
    cell = f"{form.format(mean)} ({form.format(min(found))} to {form.format(max(found))})"
    return f"{cell} | {mean / statistics.mean(plain) - 1:+.2%}"


def diloco_table(bench: Bench) -> list[str]:
    plain = bench.char_lm("long-plain", [*LONG, "--strategies", "plain"], mbits=NO_LIMIT)
    diloco = bench.char_lm("long-diloco", [*LONG, *DILOCO], mbits=NO_LIMIT)
    if plain is None or diloco is None:
        return []
    lines = ["| strategy | steps | held-out loss | MB sent |", "|---|---|---|---|"]
    for name, curve in (("synchronous", plain), ("DiLoCo, H = 50", diloco)):
        lines.append(f"| {name} | {curve['steps'][-1]} | {curve['losses'][-1]:.4f} | {curve['megabytes'][-1]:,.1f} |")
    share = diloco["megabytes"][-1] / plain["megabytes"][-1]
    worse = diloco["losses"][-1] / plain["losses"][-1] - 1
    met = ["met" if share <= DILOCO_BYTES else "missed", "met" if worse <= DILOCO_LOSS else "missed"]
    lines.append("")
    lines.append(
        f"Bytes: {share:.2%} of the synchronous run's (bar {DILOCO_BYTES:.0%}: {met[0]}). "
        f"Loss: {worse:+.2%} (bar {DILOCO_LOSS:.0%}: {met[1]})."
    )
    return lines


def plot(bench: Bench, speed: dict[str, list[float]], path: Path) -> None:
    """Plot held-out loss over bytes, and over time at the simulated rate: steps by measured steps per second."""
    import matplotlib

    matplotlib.use("Agg")  # draws to files; needs no screen
    from matplotlib import pyplot

    names = {"long-plain": "synchronous", "long-diloco": "DiLoCo, H = 50"}
    names |= {f"short-{name}-{SEEDS[0]}": f"synchronous, {name}" for name in COMPRESSIONS if name != "none"}
    rates = {"long-plain": "none", "long-diloco": "diloco"}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for job, label in names.items():
        path_of_curve = bench.work / job / "char_lm.json"
        if not path_of_curve.exists():
            continue
        (curve,) = json.loads(path_of_curve.read_text())
        axes[0].plot(curve["megabytes"], curve["losses"], label=label)
        if figures := speed.get(rates.get(job, job.split("-")[1])):
            axes[1].plot([step / max(figures) for step in curve["steps"]], curve["losses"], label=label)
    axes[0].set(xlabel="MB sent by one process", ylabel="held-out loss", xscale="log")
    axes[1].set(xlabel=f"seconds at {MBITS} Mbit/s (steps over steps/s)", xscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.suptitle("character model on the standard library's source, two processes")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="speed,accuracy,diloco", help="of these three; by commas")
    parser.add_argument("--rounds", type=int, default=3, help="of the speeds")
    ways = ",".join((*COMPRESSIONS, "diloco"))
    parser.add_argument("--ways", default=ways, help="whose speed is measured; none first")
    parser.add_argument("--work", type=Path, default=Path("runs/compression"), help="folder for every job's figures")
    parser.add_argument("--show", action="store_true", help="measure nothing, show what is there")
    options = parser.parse_args()
    bench = Bench(options.work, not options.show)
    parts = options.only.split(",")
    found = machine.describe(sorted(os.sched_getaffinity(0))[:2])
    text = [
        f"# Training with fewer bytes, {datetime.date.today()}",
        "",
        f"{found['processor']}, 2 cores, two processes, Keras on {BACKEND}; load before: {found['load_before']}.",
    ]
    figures: dict[str, list[float]] = {}
    if "speed" in parts:
        figures = speeds(bench, options.rounds, options.ways.split(","))
        text += ["", f"## Steps a second at {MBITS} Mbit/s, character model", "", *speed_table(figures)]
    if "accuracy" in parts:
        text += ["", "## What is reached", "", *accuracy_table(bench)]
    if "diloco" in parts:
        text += ["", "## DiLoCo", "", *diloco_table(bench)]
    report = "\n".join(text) + "\n"
    print(report)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{datetime.date.today()}-compression.md").write_text(report)
    plot(bench, figures, RESULTS / f"{datetime.date.today()}-compression.png")


if __name__ == "__main__":
    main()
