"""The limits of parameter servers: `make bench-servers`, or `python -m benchmarks.servers`.

Two questions, each answered by a table. How many updates per second does a server handle from clients that compute
nothing? How do the updates of a training run scale with servers and workers, until all cores compute?
Works of `benchmarks.run` compare training with parameter servers with other tools.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import job, machine, tools
from benchmarks.run import RESULTS
from benchmarks.server_calls import ADAM, BARE, CALLS, CLIENTS, Calls, gloo_ms, measure
from benchmarks.work import WORKS

WORK = WORKS["servers64"]
SERVERS, WORKERS = (1, 2, 4), (1, 2, 4, 8)
ROUNDS, WINDOWS = 3, 3
BACKEND = "jax"

# Fraction of gloo's time, and rate of MLP-sized updates up to which the server must not be the limit.
CALL_FACTOR = 0.5
LEAST_UPDATES_PER_S = 1000.0


@dataclass(frozen=True)
class Growth:
    """Result of one job with a number of servers and workers."""

    servers: int
    workers: int
    updates_per_s: float


@dataclass
class Limits:
    """All results, as stored in results/*-servers.json.

    Attributes:
        gloo_ms: Duration of an all-reduce in each round.
        calls: Results of clients that compute nothing, over all rounds.
        growth: Results of training jobs, over all rounds.
    """

    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    gloo_ms: list[float] = field(default_factory=list)
    calls: list[Calls] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Limits:
        return cls(
            **{
                **values,
                "calls": [Calls(**each) for each in values["calls"]],
                "growth": [Growth(**each) for each in values["growth"]],
            }
        )

    def of_calls(self, optimizer: str, clients: int) -> list[Calls]:
        return [each for each in self.calls if (each.optimizer, each.clients) == (optimizer, clients)]

    def updates_per_s(self, servers: int, workers: int) -> float | None:
        found = [each.updates_per_s for each in self.growth if (each.servers, each.workers) == (servers, workers)]
        return statistics.median(found) if found else None

    def verdicts(self) -> Iterator[tuple[str, str, bool]]:
        """Yield each bar that has a measurement: its text, the measured value, and whether it is met."""
        alone = self.of_calls(BARE, 1)
        if alone and self.gloo_ms:
            # Calls and all-reduce were measured in the same rounds.
            ratio = statistics.median(each.ms / gloo for each, gloo in zip(alone, self.gloo_ms, strict=False))
            yield (
                f"a bare push and pull takes at most {CALL_FACTOR:g} of the time of gloo's all-reduce",
                f"{ratio:.2f}",
                ratio <= CALL_FACTOR,
            )
        for optimizer in (BARE, ADAM):
            if alone := self.of_calls(optimizer, 1):
                limit = 1e3 / statistics.median(each.server_ms for each in alone)
                yield (
                    f"the server ({optimizer}) keeps up with at least {LEAST_UPDATES_PER_S:g} updates/s",
                    f"{limit:,.0f}",
                    limit >= LEAST_UPDATES_PER_S,
                )


def markdown(limits: Limits, plot: str | None = None) -> str:
    """Render the results as a page; `plot` is the file name of the plot next to it."""
    machine = limits.machine
    lines = [
        f"# Parameter servers, {limits.date}",
        "",
        f"{machine['processor']}, {machine['cores_used']} of {machine['cores']} cores, {machine['system']}; "
        f"{machine['matmul_gflops_per_core']} GFlop/s of float32 matrix products per core; load before the run "
        f"{machine['load_before']}.",
        ", ".join(f"{name} {version}" for name, version in limits.versions.items()) + ".",
        "",
        "## Clients that compute nothing",
        "",
        "Gradients of 1.08 MB go to one server and new values of 1.08 MB come back. The server has one core, all "
        "clients share the other. Medians over the rounds.",
        "",
        "| optimizer | clients | ms of a call | updates/s | ms of its processor each | updates/s it keeps up with |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for optimizer in (BARE, ADAM):
        for clients in sorted({each.clients for each in limits.calls}):
            found = limits.of_calls(optimizer, clients)
            if found:
                ms, rate, busy = (
                    statistics.median(getattr(each, name) for each in found)
                    for name in ("ms", "updates_per_s", "server_ms")
                )
                lines.append(f"| {optimizer} | {clients} | {ms:.3f} | {rate:,.0f} | {busy:.3f} | {1e3 / busy:,.0f} |")
    if limits.gloo_ms:
        lines += [
            "",
            f"gloo's all-reduce of as many bytes between two processes: {statistics.median(limits.gloo_ms):.3f} ms.",
        ]
    if limits.growth:
        workers = sorted({each.workers for each in limits.growth})
        lines += [
            "",
            "## Updates/s of a training",
            "",
            f"The MLP 784-256-256-10 with Adam on JAX, asynchronous, {WORK.batch} samples to an update, each variable "
            f"cut into as many pieces as there are servers. All processes share {machine['cores_used']} cores, so the "
            f"limit is that of the cores: beyond as many computing processes nothing can be gained here.",
            "",
            "| servers | " + " | ".join(f"{count} worker(s)" for count in workers) + " |",
            "| ---: |" + " ---: |" * len(workers),
        ]
        for servers in sorted({each.servers for each in limits.growth}):
            cells = [limits.updates_per_s(servers, count) for count in workers]
            lines.append(
                f"| {servers} | " + " | ".join("" if cell is None else f"{cell:,.0f}" for cell in cells) + " |"
            )
        if plot is not None:
            lines += ["", f"![updates/s over the number of workers, a line for each number of servers]({plot})"]
    verdicts = list(limits.verdicts())
    if verdicts:
        lines += ["", "## What must hold", "", "| | measured | met |", "| --- | ---: | --- |"]
        lines += [f"| {what} | {measured} | {'yes' if met else 'NO'} |" for what, measured, met in verdicts]
    if limits.failures:
        lines += ["", "## Without figures", "", *[f"- {failure.splitlines()[0]}" for failure in limits.failures]]
    return "\n".join(lines) + "\n"


def write_plot(limits: Limits, path: Path) -> None:
    """Plot updates/s over workers, with one line per number of servers. Needs Matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    styles = zip(("#1f6feb", "#c2611f", "#57606a"), ("o-", "s--", "^:"), strict=True)
    for servers, (color, style) in zip(sorted({each.servers for each in limits.growth}), styles, strict=False):
        workers = sorted({each.workers for each in limits.growth if each.servers == servers})
        rates = [limits.updates_per_s(servers, count) for count in workers]
        axis.plot(workers, rates, style, color=color, label=f"{servers} server{'s' if servers > 1 else ''}")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({each.workers for each in limits.growth}))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("workers")
    axis.set_ylabel("updates/s of the job")
    cores = limits.machine["cores_used"]
    axis.set_title(f"MLP 784-256-256-10, 64 samples to an update, {cores} cores", loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def run(
    limits: Limits, *, rounds: int, windows: int, calls: int, clients: Sequence[int], sizes: Sequence[tuple[int, int]]
) -> None:
    """Measure everything once per round, in turn."""
    for round_ in range(rounds):
        for optimizer in (BARE, ADAM):
            for count in clients:
                print(f"round {round_ + 1}: {optimizer}, {count} client(s)", flush=True)
                limits.calls.append(measure(optimizer, count, calls))
        try:
            limits.gloo_ms.append(gloo_ms(calls))
        except ModuleNotFoundError as error:
            limits.failures.append(f"gloo's all-reduce: {error.name} is not installed.")
        for servers, workers in sizes:
            print(f"round {round_ + 1}: training, {servers} server(s), {workers} worker(s)", flush=True)
            tool = tools.servers(BACKEND, "--shards", str(servers), count=servers, workers=workers)
            try:
                figures = job.run(replace(tool, name=f"{servers} servers, {workers} workers"), WORK.name, windows)
            except job.JobError as error:
                limits.failures.append(f"round {round_ + 1}: {error}")
            else:
                limits.growth.append(Growth(servers, workers, 1e3 / statistics.median(figures["ms_per_step"])))


def save(limits: Limits, name: str, folder: Path = RESULTS) -> None:
    """Write `name`.json, .md and, if Matplotlib is installed and there is something to draw, .png."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(asdict(limits), indent=1) + "\n")
    plot = f"{name}.png" if limits.growth else None
    if plot is not None:
        try:
            write_plot(limits, folder / plot)
        except ModuleNotFoundError as error:
            print(f"No plot: {error.name} is not installed (`pip install matplotlib`).")
            plot = None
    page = markdown(limits, plot)
    (folder / f"{name}.md").write_text(page)
    print(page)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--windows", type=int, default=WINDOWS, help="timed windows of each training")
    parser.add_argument("--calls", type=int, default=CALLS, help="timed calls of each client")
    parser.add_argument("--clients", type=int, default=CLIENTS, nargs="+")
    parser.add_argument("--servers", type=int, default=SERVERS, nargs="*", help="none: time no training")
    parser.add_argument("--workers", type=int, default=WORKERS, nargs="+")
    parser.add_argument("--name", help="of the files in benchmarks/results; default the date")
    parser.add_argument("--show", type=Path, metavar="JSON", help="write the page of earlier results")
    args = parser.parse_args()
    job.exit_on_termination()
    if args.show is not None:
        save(Limits.from_dict(json.loads(args.show.read_text())), args.show.stem)
        return
    limits = Limits(
        date=datetime.date.today().isoformat(),
        machine=machine.describe(job.available_cores()),
        versions=machine.versions(job.interpreter()),
    )
    sizes = [(servers, workers) for servers in args.servers for workers in args.workers]
    try:
        run(
            limits,
            rounds=args.rounds,
            windows=args.windows,
            calls=args.calls,
            clients=args.clients,
            sizes=sizes,
        )
    except KeyboardInterrupt:
        limits.failures.append("Interrupted before the last round.")
    save(limits, args.name or f"{limits.date}-servers")
    if not all(met for *_, met in limits.verdicts()):
        sys.exit("Not every bar is met.")


if __name__ == "__main__":
    main()
