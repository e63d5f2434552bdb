"""One job under a plan, from its start to the verdict."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import invariants
from tests.chaos.faults import Done, Faults
from tests.chaos.invariants import Result
from tests.chaos.job import Job, Shape, checkpoint_disk
from tests.chaos.schedule import WORKERS, Plan
from tests.support.network import Network

JOB_BOUND_S = 180.0
FAULT_BOUND_S = 60.0
"""More for each fault: its end, the others' patience, a start of the job from its beginning. On a busy machine."""
AGAIN_S = 40.0
"""How long a fault waits for the job to be whole again; then it comes over what there is."""


@dataclass
class Verdict:
    """What became of a trial.

    Attributes:
        done: the faults that were brought about.
        pauses_s: after each fault, before the next one: the longest time in which no member made a step.
        seconds: that the job took.
    """

    plan: Plan
    violations: list[str]
    done: list[Done] = field(default_factory=list)
    pauses_s: list[float | None] = field(default_factory=list)
    seconds: float = 0.0
    evictions: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        faults = ", ".join(
            f"{done.fault} -> {done.whom}" + (f" ({s:.1f}s)" if s is not None else "")
            for done, s in zip(self.done, self.pauses_s, strict=True)
        )
        where = "on hosts of their own" if self.plan.networked else "on one host"
        verdict = "; ".join(self.violations) or "ok"
        return f"seed {self.plan.seed}, {self.seconds:.0f} s, {where}: {faults or 'no fault'}: {verdict}"


def undisturbed(folder: Path, shape: Shape) -> Result:
    """The result without any fault, with which others are compared."""
    job = Job(folder, shape)
    try:
        job.start()
        job.wait_for(lambda: job.code is not None, time.monotonic() + JOB_BOUND_S)
        result = Result.of(job)
        if job.code != 0 or result is None:
            raise RuntimeError(f"the undisturbed job ended with exit code {job.code}:\n{job.said()}")
        return result
    finally:
        job.close()


def trial(folder: Path, shape: Shape, plan: Plan, reference: Result) -> Verdict:
    """Run one job under a plan."""
    began = time.monotonic()
    shared = invariants.shared_names()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(WORKERS, plan.weather)) if plan.networked else None
        has_disk = stack.enter_context(checkpoint_disk(folder / "checkpoints"))
        job = Job(folder, shape, network)
        stack.callback(job.close)
        job.start()
        done = _carry_out(job, plan, Faults(job, has_disk=has_disk))
        found = [each.violation for each in done if each.violation]
        if job.code is None:
            found.append(f"the job did not end within {_bound_s(plan):.0f} s (step {job.reached()})")
        else:
            found += invariants.violations(job, reference, shared)
        verdict = Verdict(plan, found, done, seconds=time.monotonic() - began, evictions=job.evictions())
        verdict.pauses_s = pauses_s([each.at for each in done], job.activity())
    return verdict


def _bound_s(plan: Plan) -> float:
    return JOB_BOUND_S + FAULT_BOUND_S * len(plan.faults)


def _carry_out(job: Job, plan: Plan, faults: Faults) -> list[Done]:
    """Bring the faults of a plan over a job until it ends."""
    until = time.monotonic() + _bound_s(plan)
    done: list[Done] = []
    pending: list[tuple[float, Done]] = []  # to be undone

    def undo_what_is_over(at: float) -> None:
        for entry in [entry for entry in pending if entry[0] <= at]:
            pending.remove(entry)
            if entry[1].undo is not None:
                entry[1].undo()

    for fault in plan.faults:
        patience = None

        def is_due(step: int = fault.step) -> bool:
            nonlocal patience
            undo_what_is_over(time.monotonic())
            if job.reached() < step:
                return False
            patience = patience or time.monotonic() + AGAIN_S
            return len(job.members()) > 1 or time.monotonic() > patience

        if not job.wait_for(is_due, until):
            break
        job.note_ports()
        done.append(faults.do(fault))
        if done[-1].undo is not None:
            pending.append((time.monotonic() + fault.lasts_s, done[-1]))

    def has_ended() -> bool:
        undo_what_is_over(time.monotonic())
        return job.code is not None

    job.wait_for(has_ended, until)
    undo_what_is_over(float("inf"))
    return done


def pauses_s(faults: Sequence[float], activity: Sequence[tuple[float, str]]) -> list[float | None]:
    """The longest time without a step after each fault, before the next one; None if none came after it.

    Args:
        faults: times, in their order.
        activity: see `Job.activity`. What was held up on purpose is no pause.
    """
    found: list[float | None] = []
    for fault, following in itertools.pairwise([*faults, math.inf]):
        events = [(fault, "fault"), *(event for event in activity if event[0] > fault)]
        pauses = (
            later - earlier
            for (earlier, _), (later, what) in itertools.pairwise(events)
            if earlier < following and what == "step"
        )
        found.append(max(pauses, default=None))
    return found
