"""Draws the plot of the README: `python -m benchmarks.readme_plot benchmarks/results/DATE.json`."""

from __future__ import annotations

import argparse
import io
import json
import statistics
from collections import defaultdict
from pathlib import Path

from benchmarks.report import COLORS
from benchmarks.tools import TOOLS, Kind
from scripts.pictures.svg import themed

PANELS = {"mlp64": "MLP, global batch 64", "mlp512": "MLP, global batch 512"}
SHOWN = {
    "phalanx-jax": "Phalanx on JAX",
    "phalanx-tensorflow": "Phalanx on TensorFlow",
    "phalanx-torch": "Phalanx on PyTorch",
    "ddp": "PyTorch DDP",
    "keras-ddp": "Keras in DDP",
    "tf-distribute-20": "tf.distribute, 20 steps per call",
    "tf-distribute": "tf.distribute",
    "keras-dataparallel": "keras.distribution, JAX",
}
TEXT = "#010203"
"""Placeholder for the text color, which depends on the page."""
TEXT_PARAMETERS = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
PATH = Path("docs/images/speed.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    results = parser.parse_args().results
    draw(json.loads(results.read_text())["measurements"], PATH, date=results.stem)


def medians(measurements: list[dict[str, object]]) -> dict[tuple[str, str], list[float]]:
    """Return the median of each round in milliseconds per step, by tool and work."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in measurements:
        if one.get("ms_per_step"):
            found[str(one["tool"]), str(one["work"])].append(statistics.median(one["ms_per_step"]))  # type: ignore[call-overload]
    return found


def draw(measurements: list[dict[str, object]], path: Path, date: str) -> None:
    """Draw one panel of bars per work, fastest tool first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = medians(measurements)
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "phalanx", "font.family": "DejaVu Sans"})
    pyplot.rcParams.update(dict.fromkeys(TEXT_PARAMETERS, TEXT))
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(10, 3), layout="constrained")
    for axis, (work, title) in zip(axes, PANELS.items(), strict=True):
        bars = sorted((statistics.median(found[tool, work]), tool) for tool in SHOWN if found.get((tool, work)))
        longest = max(ms for ms, _ in bars)
        axis.barh([SHOWN[tool] for _, tool in bars], [ms for ms, _ in bars], color=[_color(tool) for _, tool in bars])
        for index, (ms, _) in enumerate(bars):
            axis.text(ms + 0.01 * longest, index, f"{ms:.2f}", va="center", fontsize=8)
        axis.set_xlim(0, 1.12 * longest)
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axis.set_xlabel(f"ms per step ({date})", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    path.write_text(themed(file.getvalue(), TEXT))


def _color(tool: str) -> str:
    return COLORS[TOOLS[tool].kind if tool in TOOLS else Kind.PEER]


if __name__ == "__main__":
    main()
