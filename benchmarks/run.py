"""Times Phalanx and its peers side by side: `make bench`, or `python -m benchmarks.run`.

All tools take turns, round after round (A B C, A B C, ...), each time as a new job, so that a temporarily slow machine
is slow for all of them. Without the peers' environment (`make bench-peers`), only Phalanx and single processes are
timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import job, machine, report
from benchmarks.comparison import Comparison, Measurement
from benchmarks.tools import ALL_REDUCE, TOOLS, Kind, Tool
from benchmarks.work import APART, WORKS

EVERY_WORK = (*WORKS, ALL_REDUCE)
RESULTS = Path(__file__).resolve().parent / "results"

ROUNDS, WINDOWS = 5, 5
QUICK_ROUNDS, QUICK_WINDOWS = 1, 3

# Width of the output to a file or pipe, which has no terminal width.
FILE_COLUMNS = 120

# A tool that has failed this often on a work is not tried in later rounds.
MAX_FAILURES = 2
# Longer than the job's own limit, because a prefix command may have to wait for its turn.
PREFIXED_TIMEOUT_S = 30 * 60.0


def select(only: Sequence[str]) -> list[tuple[Tool, str]]:
    """Return the (tool, work) pairs selected by the words of `--only`, in the order of the tables.

    A word that is part of the names of works selects works; a word that is part of the names of tools selects tools.
    `["mlp", "jax"]` selects everything on JAX with the two MLPs. No words select everything except the works of
    parameter servers, which `make bench-servers` names.

    Raises: ValueError for a word that is not part of any name.
    """
    works, tools = [], []
    for word in only:
        of_works = [work for work in EVERY_WORK if word in work]
        of_tools = [tool for tool in TOOLS if word in tool]
        if not of_works and not of_tools:
            known = ", ".join([*EVERY_WORK, *TOOLS])
            raise ValueError(f"--only {word}: no work and no tool has a name with that in it; there are {known}.")
        works += of_works
        tools += of_tools
    return [
        (tool, work)
        for work in EVERY_WORK
        if work in works or (not works and (tools or work not in APART))
        for tool in TOOLS.values()
        if work in tool.works and (tool.name in tools or not tools)
    ]


def measure(
    pairs: Sequence[tuple[Tool, str]],
    comparison: Comparison,
    *,
    rounds: int,
    windows: int,
    prefix: Sequence[str],
    console: Console,
) -> Iterator[Measurement]:
    """Time every pair once per round. Jobs without figures are recorded in `comparison.failures`."""
    failed: Counter[tuple[str, str]] = Counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=rounds * len(pairs))
        for round_ in range(rounds):
            for tool, work in pairs:
                progress.update(bar, description=f"round {round_ + 1}: {tool.name} {work}")
                if failed[tool.name, work] < MAX_FAILURES:
                    try:
                        yield from _measure_once(tool, work, round_, windows, prefix)
                    except job.JobError as error:
                        failed[tool.name, work] += 1
                        comparison.failures.append(f"round {round_ + 1}: {error}")
                progress.advance(bar)


def _measure_once(tool: Tool, work: str, round_: int, windows: int, prefix: Sequence[str]) -> Iterator[Measurement]:
    """Run one job in a separate process, which the prefix command can start."""
    command = [*prefix, sys.executable, "-m", "benchmarks.job", tool.name, work, "--windows", str(windows)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=job.ROOT,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=PREFIXED_TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # the prefix command and the job, which ends its ranks
            raise
    if process.returncode:
        raise job.JobError(errors.strip())
    figures = json.loads(output)
    for system, times in figures.get("ms_per_call", {}).items():
        for case, ms in times.items():
            yield Measurement(round_, system, case, [ms])
    if tool.kind is Kind.COLLECTIVE:
        return
    yield Measurement(round_, tool.name, work, figures["ms_per_step"], figures.get("first_step_s"))
    if tool.paired_with is not None:
        yield Measurement(round_, tool.paired_with, work, figures["paired_ms_per_step"])


def save(comparison: Comparison, name: str, console: Console) -> None:
    """Write results/`name`.json, .md and, if Matplotlib is installed, .png."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(comparison.as_dict(), indent=1) + "\n")
    plot: str | None = f"{name}.png"
    try:
        report.write_plot(comparison, RESULTS / f"{name}.png")
    except ModuleNotFoundError as error:
        plot = None
        console.print(f"No plot: {error.name} is not installed (`pip install matplotlib`).")
    (RESULTS / f"{name}.md").write_text(report.markdown(comparison, plot))
    console.print(f"Written: {path.relative_to(job.ROOT)} with .md{' and .png' if plot else ''} beside it.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="mlp,jax", help="parts of the names of works and tools")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} round, for a first look")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}")
    parser.add_argument("--windows", type=int, help=f"timed windows of each job, default {WINDOWS}")
    parser.add_argument("--prefix", default="", metavar="CMD", help="put before each job: `nice -n -5`")
    parser.add_argument("--name", help="of the files in benchmarks/results; default the date")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print and write the report of earlier results")
    return parser.parse_args()


def main() -> None:
    args, console = _arguments(), Console()
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    job.exit_on_termination()
    if args.show is not None:
        comparison = Comparison.from_dict(json.loads(args.show.read_text()))
        report.print_report(comparison, console)
        save(comparison, args.show.stem, console)
        return
    only = [word.strip() for word in args.only.split(",") if word.strip()]
    try:
        pairs = select(only)
    except ValueError as error:
        sys.exit(str(error))
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    windows = args.windows or (QUICK_WINDOWS if args.quick else WINDOWS)
    comparison = Comparison(
        date=datetime.date.today().isoformat(),
        machine=machine.describe(job.available_cores()),
        versions=machine.versions(job.interpreter()),
        settings={"rounds": rounds, "windows": windows, "only": only},
    )
    if not job.PEERS_PYTHON.exists():
        missing = dict.fromkeys(tool.title for tool, _ in pairs if tool.needs_peers)
        pairs = [(tool, work) for tool, work in pairs if not tool.needs_peers]
        for title in missing:
            comparison.failures.append(f"{title}: not installed; `make bench-peers` installs the peers.")
    prefix = shlex.split(args.prefix)
    complete = not only and not args.quick
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # from `timeout`, for example: results so far are kept
    try:
        for measurement in measure(pairs, comparison, rounds=rounds, windows=windows, prefix=prefix, console=console):
            comparison.measurements.append(measurement)
    except KeyboardInterrupt:
        complete = False
        comparison.failures.append("Interrupted before the last round.")
    report.print_report(comparison, console)
    save(comparison, args.name or comparison.date + ("" if complete else "-partial"), console)


if __name__ == "__main__":
    main()
