"""Draws the life of a killed worker and the activity of its job second by second, from the job's events."""

from __future__ import annotations

from pathlib import Path

from phalanx.launcher.watching.job_follower import read_events
from phalanx.monitoring.job_events import GenerationFormed, JobEvent, TaskStarted
from scripts.pictures.recorded_job import KILLED_AT
from scripts.pictures.svg import Drawing

LEFT, RIGHT, TOP, LANE, BAR = 92, 20, 58, 46, 26
WIDTH = 860
BEFORE_S, AFTER_S = 2.0, 2.0


def draw(log_dir: Path) -> str:
    """Draw an elastic job in which one worker was killed once and returned."""
    events = list(read_events(log_dir))
    killed_at = float((log_dir / KILLED_AT).read_text())
    generations = [event for event in events if isinstance(event, GenerationFormed)]
    tasks = generations[0].tasks
    without = next(each for each in generations if each.at > killed_at)
    rejoined = next(each for each in generations if each.at > killed_at and len(each.tasks) == len(tasks))
    (victim,) = set(tasks) - set(without.tasks)
    restarted = _restart(events, victim, killed_at)

    begin, end = -BEFORE_S, rejoined.at - killed_at + AFTER_S
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)

    def x(second: float) -> float:
        return LEFT + (second - begin) * scale

    back, again, started = (each - killed_at for each in (rejoined.at, without.at, restarted))
    height = TOP + LANE * len(tasks) + 118
    drawing = Drawing(WIDTH, height, f"A job of {len(tasks)} workers, one of which is killed and joins again")
    drawing.text(
        0, 18, f"One of {len(tasks)} workers is killed: the others repeat the step and continue", 15, bold=True
    )
    for index, task in enumerate(tasks):
        y = TOP + LANE * index
        drawing.text(LEFT - 10, y + BAR / 2 + 5, task, 12, anchor="end")
        if task == victim:
            drawing.box(x(begin), y, x(0) - x(begin), BAR, "sky", radius=3)
            drawing.box(x(started), y, x(back) - x(started), BAR, "amber", radius=3)
            drawing.text((x(started) + x(back)) / 2, y + 17, "starts again: imports, connects", 11, "ink", "middle")
            drawing.text(x(0) + 4, y - 5, "SIGKILL", 11, "red", bold=True)
            drawing.box(x(0) - 2, y - 3, 4, BAR + 6, "red", radius=1)
        else:
            drawing.box(x(begin), y, x(0) - x(begin), BAR, "sky", radius=3)
            drawing.box(x(again), y, x(back) - x(again), BAR, "green", radius=3)
            drawing.text(
                (x(again) + x(back)) / 2,
                y + 17,
                f"training continues with {len(without.tasks)} workers",
                11,
                "ink",
                "middle",
            )
        drawing.box(x(back), y, x(end) - x(back), BAR, "sky", radius=3)
    below = TOP + LANE * len(tasks) - 6
    step = 1 if end - begin <= 20 else 5
    for second in range(0 if step > 1 else int(begin), int(end) + 1, step):
        drawing.line([(x(second), below), (x(second), below + 5)])
        drawing.text(x(second), below + 19, f"{second} s", 11, "muted", "middle")
    drawing.line([(x(begin), below), (x(end), below)])
    lines = [
        f"{_ms(again)} after the kill the survivors have noticed, form a new generation and repeat the step.",
        f"{_ms(started)} after the kill the launcher starts the worker again.",
        f"{back:.1f} s after the kill it joins and gets weights, optimizer state and step. No step is lost.",
    ]
    for index, line in enumerate(lines):
        drawing.text(LEFT, below + 46 + 20 * index, line, 12, "muted")
    return str(drawing)


def _restart(events: list[JobEvent], task: str, after: float) -> float:
    return next(
        event.at for event in events if isinstance(event, TaskStarted) and event.task == task and event.at > after
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
