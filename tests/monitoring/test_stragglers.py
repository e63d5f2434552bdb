"""Who is slow, from what members say of their computing and waiting."""

from __future__ import annotations

from phalanx.monitoring.stragglers import StepTiming, StragglerDetector

NAMES = {"a": "worker/0 (rank 0)", "b": "worker/1 (rank 1)", "c": "worker/2 (rank 2)"}


class Job:
    """Three members that take ten steps a second; `computing` says which part of the time each computes."""

    def __init__(self, timeout_s: float = 600.0):
        self.detector = StragglerDetector(timeout_s=timeout_s)
        self.now = 0.0
        self.said: list[str] = []

    def goes_on(self, seconds: float, generation: int = 1, **computing: float) -> list[str]:
        """What is said meanwhile."""
        before = len(self.said)
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            for member, part in computing.items():
                timing = StepTiming("gradients", 0, 3, 0.0, 0.5 * part, 0.5 * (1 - part), 5)
                self.detector.add(member, timing, self.now)
            self.said += self.detector.detect(NAMES, generation, self.now)
        return self.said[before:]


def test_members_alike_are_not_slow():
    job = Job()
    assert job.goes_on(30, a=0.7, b=0.8, c=0.75) == []


def test_a_straggler_is_named_once_and_when_it_is_over():
    job = Job()
    job.goes_on(10, a=0.8, b=0.8, c=0.8)
    (line,) = job.goes_on(30, a=0.4, b=1.0, c=0.5)
    assert line.startswith("worker/1 (rank 1) is slow, and the others wait for it: it computes")
    assert job.detector.is_slow("b")
    assert job.goes_on(30, a=0.8, b=0.8, c=0.8) == ["worker/1 (rank 1) recovered"]
    assert not job.detector.is_slow("b")


def test_a_moment_makes_no_straggler():
    """A chief that saves for two seconds, now and then."""
    job = Job()
    job.goes_on(10, a=0.9, b=0.9, c=0.9)
    assert job.goes_on(2, a=1.0, b=0.0, c=0.0) + job.goes_on(20, a=0.9, b=0.9, c=0.9) == []


def test_where_all_wait_for_something_else_nobody_is_slow():
    assert Job().goes_on(30, a=0.0, b=0.0, c=0.0) == []


def test_where_nobody_waits_nobody_is_slow():
    job = Job()
    assert job.goes_on(30, a=0.45, b=0.9, c=0.9) == []


def test_one_for_which_all_wait_in_a_step_without_end_is_named():
    """No step is over in the window: parts of the time are compared."""
    job = Job()
    for _ in range(20):
        job.now += 0.5
        for member, part in (("a", 0.1), ("b", 0.9), ("c", 0.1)):
            job.detector.add(member, StepTiming("gradients", 0, 3, 1.0, 0.5 * part, 0.5 * (1 - part)), job.now)
        job.said += job.detector.detect(NAMES, 1, job.now)
    assert job.said == [
        "worker/1 (rank 1) is slow, and the others wait for it: it computes for 90% of the time, the others for 10%"
    ]


def test_one_that_is_silent_while_others_wait_is_named():
    job = Job()
    job.goes_on(10, a=0.8, b=0.8, c=0.8)
    (line,) = job.goes_on(8, a=0.0, b=0.0)
    assert line == "worker/2 (rank 2) has been silent for 5 s, and the others wait for it"
    assert job.goes_on(20, a=0.8, b=0.8, c=0.8) == ["worker/2 (rank 2) recovered"]


def test_with_another_generation_all_begins_anew():
    job = Job()
    job.goes_on(3, a=0.4, b=1.0, c=0.4)
    assert job.goes_on(3, generation=2, a=0.4, b=1.0, c=0.4) == []


def test_one_that_lives_and_does_nothing_is_told_of_once():
    """No member waits for one that is alone, so it is not evicted."""
    paces = StragglerDetector(timeout_s=60.0)
    names = {"a": "worker/0 (rank 0)"}
    paces.add("a", StepTiming("gradients", 1, 3, 59.0), 1.0)
    assert paces.detect(names, 1, 1.0) == []  # of before the generation
    paces.add("a", StepTiming("gradients", 1, 3, 61.0), 3.0)
    (line,) = paces.detect(names, 1, 3.0)
    assert line == "worker/0 (rank 0) is alive but has been at gradients, epoch 1, step 3 for 61 s"
    assert paces.detect(names, 1, 4.0) == []
    paces.add("a", StepTiming("all_reduce", 1, 4, 100.0), 5.0)
    assert paces.detect(names, 1, 5.0) == []


def test_one_that_is_known_for_longer_is_no_straggler_for_that():
    """At the start members come one after the other; parts of the time are compared, not seconds."""
    job = Job()
    job.goes_on(8, a=1.0)
    assert job.goes_on(8, a=1.0, b=0.73, c=0.73) == []
