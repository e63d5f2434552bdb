"""Draws a training step on two replicas from a timeline that `--timeline-filename` has recorded."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from scripts.pictures.recorded_job import read_timeline
from scripts.pictures.svg import Drawing

LEFT, RIGHT, TOP, LANE, BAR = 92, 20, 58, 84, 26
WIDTH = 860
PARTS = {"data": "amber", "forward/backward": "blue", "merge": "sky", "apply": "green", "callbacks": "grey"}
COLLECTIVES = {"all_reduce": "sky", "wait": "red", "fuse": "grey"}
TRAINING, COLLECTIVE = 1, 2


class Span(NamedTuple):
    """A part of a step. Times are in microseconds."""

    rank: int
    track: int
    name: str
    begin: float
    end: float


def draw(timeline: Path) -> str:
    """Draw a fast step in the second half of a job of two workers: one of fifty is faster."""
    spans = [
        Span(event["pid"], event["tid"], event["name"], event["ts"], event["ts"] + event["dur"])
        for event in read_timeline(timeline)
        if event.get("ph") == "X"
    ]
    begin, end = _fast_step(spans)
    shown = [each for each in spans if each.begin < end and each.end > begin]
    shown.sort(key=lambda each: (each.begin, -each.end))  # nested spans come later and are drawn on top
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    ranks = sorted({each.rank for each in shown})
    below = TOP + LANE * len(ranks) - 10
    drawing = Drawing(WIDTH, below + 78, "The parts of a training step on two replicas")
    drawing.text(0, 18, f"A training step of {(end - begin) / 1000:.2f} ms on two replicas", 15, bold=True)
    for index, rank in enumerate(ranks):
        y = TOP + LANE * index
        drawing.text(LEFT - 10, y + 17, f"worker/{rank}", 12, anchor="end")
        drawing.text(LEFT - 10, y + BAR + 22, "network", 11, "muted", "end")
        for span in (each for each in shown if each.rank == rank):
            colors = PARTS if span.track == TRAINING else COLLECTIVES
            if span.name not in colors:
                continue
            first, last = max(span.begin, begin), min(span.end, end)
            x, width = LEFT + (first - begin) * scale, max((last - first) * scale, 1)
            top, height = (y, BAR) if span.track == TRAINING else (y + BAR + 6, 22)
            drawing.box(x, top, width, height, colors[span.name], radius=2)
            if span.track == TRAINING and width > 7 * len(span.name):
                drawing.text(x + width / 2, top + 17, span.name, 11, "ink", "middle")
    _axis(drawing, below, scale, end - begin)
    _legend(drawing, below + 56)
    return str(drawing)


def _fast_step(spans: list[Span]) -> tuple[float, float]:
    """Begin and end of the step of rank 0, from waiting for its batch to the end of its update."""
    steps: list[tuple[float, float]] = []
    training: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda each: each.begin):
        if span.track == TRAINING:
            training[span.rank].append(span)
    starts = [each for each in training[0] if each.name == "data"]
    for this, following in itertools.pairwise(starts):
        inside = {each.name for each in training[0] if this.begin <= each.begin < following.begin}
        if {"forward/backward", "merge", "apply"} <= inside:
            steps.append((this.begin, following.begin))
    later = sorted(steps[len(steps) // 2 :], key=lambda step: step[1] - step[0])
    return later[len(later) // 50]


def _axis(drawing: Drawing, y: float, scale: float, length: float) -> None:
    drawing.line([(LEFT, y), (WIDTH - RIGHT, y)])
    step = next(each for each in (50, 100, 200, 500, 1000, 2000, 5000, 10000) if length / each <= 10)
    for micros in range(0, int(length) + 1, step):
        x = LEFT + micros * scale
        drawing.line([(x, y), (x, y + 5)])
        drawing.text(x, y + 19, f"{micros / 1000:g} ms", 11, "muted", "middle")


def _legend(drawing: Drawing, y: float) -> None:
    entries: list[tuple[str, Any]] = [
        ("data", "amber"),
        ("gradients", "blue"),
        ("merge", "sky"),
        ("wait for the other replica", "red"),
        ("optimizer", "green"),
        ("callbacks, packing", "grey"),
    ]
    x = float(LEFT)
    for name, color in entries:
        drawing.box(x, y - 10, 12, 12, color, radius=2)
        drawing.text(x + 17, y, name, 11.5, "muted")
        x += 36 + 5.9 * len(name)
