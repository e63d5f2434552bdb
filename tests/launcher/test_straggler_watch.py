"""Slow workers, from what they report in the page that they share with their launcher."""

from __future__ import annotations

import itertools

from phalanx.launcher.host_messages import WorkerReport
from phalanx.launcher.straggler_watch import StragglerWatch
from phalanx.monitoring.worker_figures import WorkerFigures

SLOW = "worker/1 (rank 1) is slow, and the others wait for it: it computes for 100 ms per step, the others for 40 ms"


def report(rank: int, second: int, computes: float) -> WorkerReport:
    figures = WorkerFigures(computed_s=second * computes, waited_s=second * (1 - computes), steps=10 * second)
    return WorkerReport(rank, "gradients", 0, second, 0.0, figures=figures)


def told(watch: StragglerWatch, seconds: range, **computes: float) -> list[str]:
    ranks = {0: "a", 1: "b", 2: "c"}
    return [
        line
        for second in seconds
        for rank, name in ranks.items()
        if name in computes
        for line in watch.add(report(rank, second, computes[name]), f"worker/{rank}", float(second))
    ]


def test_a_slow_worker_is_named_until_it_has_exited() -> None:
    watch = StragglerWatch()
    assert told(watch, range(20), a=0.4, b=1.0, c=0.4) == [SLOW]
    assert watch.slow == ["worker/1"]
    watch.forget("worker/1")
    assert told(watch, range(20, 40), a=0.4, c=0.4) == []
    assert watch.slow == []


def test_a_worker_that_does_not_take_part_yet_is_not_compared() -> None:
    watch = StragglerWatch()
    watch.use_members(["worker/0", "worker/2"])
    assert told(watch, range(20), a=0.4, b=1.0, c=0.4) == []
    watch.use_members(["worker/0", "worker/1", "worker/2"])
    assert told(watch, range(20, 40), a=0.4, b=1.0, c=0.4) == [SLOW]


def test_what_is_no_news_is_not_counted() -> None:
    watch = StragglerWatch()
    assert watch.add(WorkerReport(0, "import", None, None, 1.0), "worker/0", 1.0) == []
    assert watch.slow == []


def first_step(watch: StragglerWatch, seconds: range, rank: int, waits: float) -> list[str]:
    """What a worker is said to be while it compiles, which the others wait for."""
    lines = []
    for second in seconds:
        figures = WorkerFigures(computed_s=second * (1 - waits), waited_s=second * waits, steps=1)
        seen = WorkerReport(rank, "gradients", 0, 0, 0.0, figures=figures)
        lines += watch.add(seen, f"worker/{rank}", float(second))
    return lines


def test_who_compiles_longer_than_the_others_is_no_straggler() -> None:
    watch = StragglerWatch()
    lines = []
    for second in range(40):
        for rank, waits in enumerate((0.9, 0.0, 0.9)):
            lines += first_step(watch, range(second, second + 1), rank, waits)
    assert lines == []
    assert watch.slow == []


def test_there_is_at_most_one_note_a_minute_and_the_end_only_of_what_was_noted() -> None:
    watch = StragglerWatch()
    lines: list[tuple[int, str]] = []
    computed = [0.0, 0.0, 0.0]
    for second in range(200):
        is_slow = second % 40 < 20  # for 20 s, then not for 20 s, and so on
        for rank in range(3):
            computed[rank] += 1.0 if rank == 1 and is_slow else 0.4
            figures = WorkerFigures(computed_s=computed[rank], waited_s=second + 1 - computed[rank], steps=10 * second)
            seen = WorkerReport(rank, "gradients", 0, 0, 0.0, figures=figures)
            for line in watch.add(seen, f"worker/{rank}", float(second)):
                lines.append((second, "slow" if " is slow" in line else line.split()[-1]))
    noted = [second for second, word in lines if word == "slow"]
    assert [word for _, word in lines] == ["slow", "recovered"] * len(noted)
    assert len(noted) >= 2
    assert all(later - earlier >= 60 for earlier, later in itertools.pairwise(noted))
