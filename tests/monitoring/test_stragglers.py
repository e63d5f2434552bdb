"""Who is slow, from what members report of their computing and waiting."""

from __future__ import annotations

import itertools

from phalanx.monitoring.stragglers import StragglerDetector
from phalanx.monitoring.worker_figures import TaskReport, WorkerFigures

TASKS = {"a": "worker/0", "b": "worker/1", "c": "worker/2"}
LOST = ", and the others wait for it: it computes"
SLOW = f"worker/1 (rank 1) is slow{LOST} for 100 ms per step, the others for 40 ms"


class Job:
    """Three members that take ten steps a second; `computing` says which part of the time each computes."""

    def __init__(self, timeout_s: float = 600.0, steps_per_s: int = 10):
        self.detector = StragglerDetector(timeout_s=timeout_s)
        self.now = 0.0
        self._steps_per_s = steps_per_s
        self._done = {member: WorkerFigures() for member in TASKS}

    def goes_on(self, seconds: float, **computing: float) -> list[str]:
        """What is said meanwhile."""
        said = []
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            for member, part in computing.items():
                done = self._done[member]
                self._done[member] = WorkerFigures(
                    computed_s=done.computed_s + 0.5 * part,
                    waited_s=done.waited_s + 0.5 * (1 - part),
                    steps=(done.steps or 2) + self._steps_per_s // 2,
                )
                said += self.reports(member, TaskReport("gradients", 0, 3, 0.0, figures=self._done[member]))
        return said

    def reports(self, member: str, report: TaskReport) -> list[str]:
        task = TASKS[member]
        return self.detector.add(task, f"{task} (rank {task[-1]})", report, self.now)


def test_members_alike_are_not_slow() -> None:
    assert Job().goes_on(30, a=0.7, b=0.8, c=0.75) == []


def test_a_straggler_is_named_once_and_when_it_is_over() -> None:
    job = Job()
    job.goes_on(10, a=0.8, b=0.8, c=0.8)
    (line,) = job.goes_on(30, a=0.4, b=1.0, c=0.5)
    assert line.startswith(f"worker/1 (rank 1) is slow{LOST}")
    assert job.detector.slow == ["worker/1"]
    assert job.goes_on(30, a=0.8, b=0.8, c=0.8) == ["worker/1 (rank 1) recovered"]
    assert job.detector.slow == []


def test_a_straggler_is_slow_until_it_has_exited() -> None:
    job = Job()
    assert job.goes_on(20, a=0.4, b=1.0, c=0.4) == [SLOW]
    job.detector.forget("worker/1")
    assert job.detector.slow == []
    assert job.goes_on(20, a=0.4, c=0.4) == []


def test_one_that_does_not_take_part_yet_is_not_compared() -> None:
    job = Job()
    job.detector.use_members(["worker/0", "worker/2"])
    assert job.goes_on(20, a=0.4, b=1.0, c=0.4) == []
    job.detector.use_members(["worker/0", "worker/1", "worker/2"])
    assert job.goes_on(20, a=0.4, b=1.0, c=0.4) == [SLOW]


def test_a_moment_makes_no_straggler() -> None:
    """A chief that saves for two seconds, now and then."""
    job = Job()
    job.goes_on(10, a=0.9, b=0.9, c=0.9)
    assert job.goes_on(2, a=1.0, b=0.0, c=0.0) + job.goes_on(20, a=0.9, b=0.9, c=0.9) == []


def test_where_all_wait_for_something_else_nobody_is_slow() -> None:
    assert Job().goes_on(30, a=0.0, b=0.0, c=0.0) == []


def test_where_nobody_waits_nobody_is_slow() -> None:
    assert Job().goes_on(30, a=0.45, b=0.9, c=0.9) == []


def test_one_for_which_all_wait_in_a_step_without_end_is_named() -> None:
    """No step is over in the window: parts of the time are compared."""
    (line,) = Job(steps_per_s=0).goes_on(10, a=0.1, b=0.9, c=0.1)
    assert line == f"worker/1 (rank 1) is slow{LOST} for 90% of the time, the others for 10%"


def test_one_that_is_silent_while_others_wait_is_named() -> None:
    job = Job()
    job.goes_on(10, a=0.8, b=0.8, c=0.8)
    (line,) = job.goes_on(8, a=0.0, b=0.0)
    assert line == "worker/2 (rank 2) has been silent for 5 s, and the others wait for it"
    assert job.goes_on(20, a=0.8, b=0.8, c=0.8) == ["worker/2 (rank 2) recovered"]


def test_with_other_members_all_are_compared_from_the_start() -> None:
    job = Job()
    job.goes_on(3, a=0.4, b=1.0, c=0.4)
    job.detector.use_members(TASKS.values())
    assert job.goes_on(3, a=0.4, b=1.0, c=0.4) == []


def test_one_that_lives_and_does_nothing_is_named_once() -> None:
    """No member waits for one that is alone, so it is not evicted."""
    job = Job(timeout_s=60.0)
    job.goes_on(1, a=1.0)

    def stays(phase: str, age_s: float) -> list[str]:
        return job.reports("a", TaskReport(phase, 1, 3, age_s, figures=WorkerFigures(steps=7)))

    assert stays("gradients", 59.0) == []
    assert stays("gradients", 61.0) == [
        "worker/0 (rank 0) is alive but has been at gradients, epoch 2, step 4 for 61 s"
    ]
    assert stays("gradients", 62.0) == stays("all_reduce", 100.0) == []


def test_one_that_is_known_for_longer_is_no_straggler_for_that() -> None:
    """At the start members come one after the other; parts of the time are compared, not seconds."""
    job = Job()
    job.goes_on(8, a=1.0)
    assert job.goes_on(8, a=1.0, b=0.73, c=0.73) == []


def test_without_figures_there_is_nothing_to_compare() -> None:
    job = Job(timeout_s=0.5)
    assert job.reports("a", TaskReport("import", None, None, 1.0)) == []
    assert job.detector.slow == []


def test_one_that_compiles_longer_than_the_others_is_no_straggler() -> None:
    """The others wait for it in the first step."""
    job = Job()
    for second in range(40):
        job.now = float(second)
        for member, waits in (("a", 0.9), ("b", 0.0), ("c", 0.9)):
            figures = WorkerFigures(computed_s=second * (1 - waits), waited_s=second * waits, steps=1)
            assert job.reports(member, TaskReport("gradients", 0, 0, 0.0, figures=figures)) == []
    assert job.detector.slow == []


def test_there_is_at_most_one_note_a_minute_and_the_end_only_of_what_was_noted() -> None:
    job = Job()
    lines: list[tuple[float, str]] = []
    for _ in range(5):
        for b in (1.0, 0.4):
            for _ in range(20):
                found = job.goes_on(1, a=0.4, b=b, c=0.4)
                lines += [(job.now, "slow" if " is slow" in line else line.split()[-1]) for line in found]
    noted = [at for at, word in lines if word == "slow"]
    assert [word for _, word in lines] == ["slow", "recovered"] * len(noted)
    assert len(noted) >= 2
    assert all(later - earlier >= 60 for earlier, later in itertools.pairwise(noted))


def test_members_found_at_the_same_time_are_all_named() -> None:
    """Those of a host that has stopped."""
    job = Job()
    job.goes_on(10, a=0.8, b=0.8, c=0.8)
    lines = job.goes_on(8, a=0.0)
    assert [line.split(" (")[0] for line in lines] == ["worker/1", "worker/2"]
