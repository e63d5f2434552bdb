"""Renders a comparison for the terminal, as Markdown and as a plot."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.comparison import Comparison, Spread, Verdict
from benchmarks.tools import ALL_REDUCE_SYSTEMS, TOOLS, Kind, Share, Tool
from benchmarks.work import WORKS

Row = tuple[str, ...]

# The startup time depends on packages and tasks and hardly on the model, so one model is shown for each.
START_WORKS = ("mlp64", "servers64")
# Blue, orange and gray also differ in lightness, for prints and color-blind readers.
COLORS = {Kind.PHALANX: "#1f6feb", Kind.PEER: "#c2611f", Kind.SINGLE: "#8b949e"}
TITLE_WIDTH = 70  # characters per line in the title of a plot
KINDS = {Kind.PHALANX: "Phalanx", Kind.PEER: "peers", Kind.SINGLE: "one process, not distributed"}


def print_report(comparison: Comparison, console: Console) -> None:
    """Print all tables of the comparison."""
    for title, header, rows in _tables(comparison):
        table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
        for index, name in enumerate(header):
            table.add_column(name, justify="left" if index < 2 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row, style=_style(row))
        console.print(table)
    for failure in comparison.failures:
        console.print(f"[red]no figures:[/] {failure}", highlight=False)


def markdown(comparison: Comparison, plot: str | None = None) -> str:
    """Render the comparison as a Markdown page; `plot` is the file name of the plot next to it."""
    machine = comparison.machine
    lines = [
        f"# Benchmarks of {comparison.date}",
        "",
        f"{machine['processor']}, {machine['cores_used']} of {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['system']}; {machine['matmul_gflops_per_core']} GFlop/s of float32 "
        f"matrix products per core; load before the run {machine['load_before']}.",
        ", ".join(f"{name} {version}" for name, version in comparison.versions.items()) + ".",
        "",
        "Milliseconds per step: the median over {rounds} round(s) with the least and the greatest; each round's "
        "figure is the median of {windows} windows. In a round all tools take turns. Ratios are formed "
        "within a round.".format(**comparison.settings),
    ]
    for title, header, rows in _tables(comparison):
        lines += ["", f"## {title}", ""]
        lines.append("| " + " | ".join(header) + " |")
        lines.append("|" + "|".join(" --- " if index < 2 else " ---: " for index in range(len(header))) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    if plot is not None:
        lines += ["", f"![ms per step of every tool]({plot})"]
    if comparison.failures:
        lines += ["", "## Without figures", ""]
        lines += [f"- {failure.splitlines()[0]}" for failure in comparison.failures]
    return "\n".join(lines) + "\n"


def write_plot(comparison: Comparison, path: Path) -> None:
    """Draw one panel of bars per measured work. Needs Matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    panels = [(work, bars) for work in WORKS if (bars := _bars(comparison, work))]
    if not panels:
        return
    heights = [len(bars) for _, bars in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(10, 1.2 + 0.34 * sum(heights) + 0.6 * len(panels)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, (work, bars) in zip(axes[:, 0], panels, strict=True):
        spreads = [spread for _, spread in bars]
        medians = [spread.median for spread in spreads]
        below = [spread.median - spread.least for spread in spreads]
        above = [spread.greatest - spread.median for spread in spreads]
        axis.barh(
            [tool.title for tool, _ in bars],
            medians,
            xerr=(below, above),
            color=[COLORS[tool.kind] for tool, _ in bars],
            error_kw={"elinewidth": 1, "ecolor": "#444c56"},
            height=0.7,
        )
        longest = max(spread.greatest for spread in spreads)
        for index, spread in enumerate(spreads):
            axis.text(spread.greatest + 0.01 * longest, index, f"{spread.median:.2f}", va="center", fontsize=8)
        axis.set_xlim(0, 1.08 * longest)
        axis.invert_yaxis()
        title = textwrap.fill(_work_title(work), TITLE_WIDTH)
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[-1, 0].set_xlabel("ms per step (shorter is faster)")
    shown = {tool.kind for _, bars in panels for tool, _ in bars}
    figure.legend(
        handles=[Patch(color=COLORS[kind], label=KINDS[kind]) for kind in KINDS if kind in shown],
        loc="outside lower center",
        ncols=len(KINDS),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(comparison: Comparison, work: str) -> list[tuple[Tool, Spread]]:
    found = [(tool, comparison.ms(tool.name, work)) for tool in TOOLS.values() if tool.paired_with is None]
    return sorted(((tool, spread) for tool, spread in found if spread is not None), key=lambda bar: bar[1].median)


def _tables(comparison: Comparison) -> Iterator[tuple[str, Row, list[Row]]]:
    for work in WORKS:
        bars = _bars(comparison, work)
        if bars:
            yield _work_title(work), ("tool", "cores", *_SPEED_HEADER), _speed_rows(comparison, work, bars)
    for work in START_WORKS:
        starts = [
            (tool.title, tool.share.value, *_spread(spread))
            for tool in TOOLS.values()
            if (spread := comparison.first_step_s(tool.name, work)) is not None
        ]
        if starts:
            yield (
                f"From the start of the job to the end of its first step ({work}), seconds",
                ("tool", "cores", "median", "least", "greatest"),
                starts,
            )
    header, rows = _all_reduce_rows(comparison)
    if rows:
        yield "All-reduce between two processes of one host, a core each", header, rows
    verdicts = [_verdict_row(verdict) for verdict in comparison.verdicts()]
    if verdicts:
        header = ("tool", "against", "work", "measured", "least", "greatest", "required", "met")
        yield "What must hold", header, verdicts


_SPEED_HEADER = ("ms per step", "least", "greatest", "samples/s")


def _speed_rows(comparison: Comparison, work: str, bars: list[tuple[Tool, Spread]]) -> list[Row]:
    gflops = comparison.machine["cores_used"] * comparison.machine["matmul_gflops_per_core"]
    floor = (
        "(its matrix products alone, at this machine's rate)",
        Share.ALL.value,
        f"{1e-6 * WORKS[work].flop / gflops:.2f}",
        *("", "", ""),
    )
    return [
        floor,
        *(
            (tool.title, tool.share.value, *_spread(spread), f"{comparison.samples_per_s(tool.name, work):,.0f}")
            for tool, spread in bars
        ),
    ]


def _verdict_row(verdict: Verdict) -> Row:
    comparative = ">=" if verdict.unit == "x" else "<="
    return (
        verdict.tool,
        f"{verdict.against} ({verdict.note})" if verdict.note and verdict.against else verdict.against or verdict.note,
        verdict.work,
        *(f"{each} {verdict.unit}" for each in _spread(verdict.measured)),
        f"{comparative} {verdict.required:.3g} {verdict.unit}",
        "yes" if verdict.met else "NO",
    )


def _all_reduce_rows(comparison: Comparison) -> tuple[Row, list[Row]]:
    """Return cases as rows and systems as columns, in ms per call."""
    systems = [each for each in ALL_REDUCE_SYSTEMS if any(m.tool == each for m in comparison.measurements)]
    cases = list(dict.fromkeys(m.work for m in comparison.measurements if m.tool in systems))
    rows = []
    for case in cases:
        name = f"{int(case):,} bytes" if case.isdecimal() else case
        spreads = [comparison.ms(system, case) for system in systems]
        rows.append((name, *("" if spread is None else f"{spread.median:.3f}" for spread in spreads)))
    return ("float32, all in ms", *systems), rows


def _spread(spread: Spread) -> Row:
    return tuple(f"{each:.2f}" for each in (spread.median, spread.least, spread.greatest))


def _style(row: Row) -> str | None:
    if row[-1] == "NO":
        return "red"
    return "bold" if row[0].startswith("Phalanx") else None


def _work_title(work: str) -> str:
    chosen = WORKS[work]
    name = {"mlp": "MLP 784-256-256-10", "cnn": "CNN 32x32x3"}[chosen.model]
    if chosen.together:
        return f"{name}, Adam, global batch {chosen.batch}"
    slow = f", one of the workers {chosen.slow_ms:g} ms slower at each step" if chosen.slow_ms else ""
    return f"{name}, Adam, {chosen.batch} samples of one worker, 2 workers{slow}"
