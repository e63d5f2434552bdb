"""Renders predictions as a table and as a plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigurationError
from phalanx.planning.collective_costs import CollectiveCosts
from phalanx.planning.scaling import StepPrediction
from phalanx.planning.step_measurement import StepMeasurement

HEADINGS = ("machines", "batch", "per replica", "computes", "merges", "step", "samples/s", "speed-up", "efficiency")


def render_table(predictions: Sequence[StepPrediction]) -> str:
    """Render one line per prediction. Speed-up and efficiency compare samples per second with the first prediction."""
    first = predictions[0]
    rows = [HEADINGS]
    for each in predictions:
        speedup = each.samples_per_s / first.samples_per_s
        rows.append(
            (
                f"{each.machines.count:,}",
                f"{round(each.global_batch):,}",
                f"{each.local_batch:,}",
                milliseconds(each.computed_s),
                milliseconds(each.merged_s),
                milliseconds(each.step_s),
                f"{each.samples_per_s:,.0f}",
                f"{speedup:.1f}",
                f"{speedup * first.machines.count / each.machines.count:.0%}",
            )
        )
    return render_rows(rows, ">" * len(HEADINGS))


def render_rows(rows: Sequence[Sequence[str]], alignments: str) -> str:
    """Render rows of cells as lines, with columns aligned left (`<`) or right (`>`)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, alignments, widths, strict=True)
        lines.append("  ".join(f"{cell:{alignment}{width}}" for cell, alignment, width in cells).rstrip())
    return "\n".join(lines)


def describe_measurement(measurement: StepMeasurement) -> str:
    """Describe a measurement in one line."""
    period = "" if measurement.cycle == 1 else f", as the mean of {measurement.cycle} steps"
    return (
        f"{measurement.weights:,} weights on {measurement.backend}; a replica merges "
        f"{byte_count(measurement.merged_bytes)} per step{period}"
    )


def describe_costs(costs: CollectiveCosts) -> str:
    """Describe in one line what limits the data rate."""
    software = 1 / costs.software.link_byte_s
    link, latency = costs.link.bytes_per_s, milliseconds(costs.link.latency_s)
    slower = "the link" if link < software else "the core"
    return (
        f"a link carries {byte_count(link)}/s with a latency of {latency}, and a core encrypts "
        f"and merges {byte_count(software)}/s: {slower} limits large merges"
    )


def milliseconds(seconds: float) -> str:
    """Format a duration such as `12.3 ms`, with three significant digits."""
    value = 1e3 * seconds
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms"


def byte_count(count: float) -> str:
    """Format a size such as `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def check_plot(path: Path) -> None:
    """Check that a plot can be written to this file.

    Raises: ConfigurationError if it cannot.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigurationError(f"--plot {path}: write a file name that ends with .svg or .png.")
    directory = path.absolute().parent
    if not directory.is_dir():
        raise ConfigurationError(f"--plot {path}: there is no directory {directory}.")
    if not os.access(directory, os.W_OK):
        raise ConfigurationError(f"--plot {path}: the directory {directory} is not writable.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("--plot needs Matplotlib: pip install matplotlib") from error


def plot(predictions: Sequence[StepPrediction], marked: int, path: Path, title: str) -> None:
    """Plot the throughput and the parts of a step over the number of machines.

    Args:
        predictions: Predictions in ascending order of machines.
        marked: Number of machines that the user asked for.
        path: SVG or PNG file to write.
        title: Title of the plot.

    Raises: ConfigurationError if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws to files; needs no screen
    from matplotlib import pyplot

    counts = [each.machines.count for each in predictions]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    left.plot(counts, [each.samples_per_s for each in predictions], marker="o", markersize=3, label="predicted")
    one = predictions[0]
    ideal = [one.samples_per_s * count / one.machines.count for count in counts]
    left.plot(counts, ideal, linestyle="--", color="grey", label="linear")
    left.set(ylabel="samples/s", yscale="log")
    right.plot(counts, [1e3 * each.computed_s for each in predictions], label="a replica computes")
    right.plot(counts, [1e3 * each.merged_s for each in predictions], label="the merge adds")
    right.plot(counts, [1e3 * each.step_s for each in predictions], color="black", label="step")
    right.set(ylabel="ms", yscale="symlog")
    for axis in (left, right):
        axis.axvline(marked, color="grey", linewidth=0.8)
        axis.set(xlabel="machines")
        _label_powers(axis, counts)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:  # the measurements took minutes, and their table is already shown
        raise ConfigurationError(f"--plot {path}: the file cannot be written: {error.strerror}.") from error
    finally:
        pyplot.close(figure)


def _label_powers(axis: Any, counts: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [f"{count:,}" for count in counts], rotation=60, fontsize=7)
