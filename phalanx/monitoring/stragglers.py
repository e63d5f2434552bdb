"""Detects stragglers by comparing how long each member computes and waits. Pure bookkeeping; time is an argument.

All members take the same steps together, so a step takes the same time on all of them, but they divide it differently:
a slow member computes while the others wait. It is a *straggler* if, over some seconds, it computes at least `SLOW`
times as long as the median of the others, and the others wait for a significant part of the time. If no member waits,
there is no straggler, however much the members differ. Reports arrive twice a second, so detection costs a step
nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

from phalanx.monitoring.job_view import UNREPORTED_S
from phalanx.monitoring.job_wording import place
from phalanx.monitoring.worker_figures import TaskReport, WorkerFigures

WINDOW_S = 10.0
"""Time window of the comparison. Long compared with occasional work of a single member, such as saving."""
MIN_KNOWN_S = 4.0
"""Minimum time covered by the reports of each member."""
SLOW = 1.5
"""A member that computes this many times as long as the others is a straggler."""
RECOVERED = 1.25
"""Below this factor, a straggler has recovered. Less than `SLOW`, so that small fluctuations are not reported."""
MIN_WAITING = 0.2
"""Minimum fraction of the time that the other members spend waiting."""
COMPILED_STEPS = 2
"""A member that has begun this many steps has finished the first one, in which it compiles the model."""
UNCOUNTED_S = 60.0
"""If a program reports no steps, such as a custom loop, figures after this time count."""
QUIET_S = 60.0
"""Minimum time between two warnings about slow members."""

COLLECTIVE = "all_reduce"
"""Phase of a member that waits for others. The member that it waits for is reported as stuck, not the waiting one."""


class _Member:
    """Figures of a task that has reported.

    Attributes:
        name: Display name.
        window: Figures of the last seconds. They are cumulative: last minus first is the work in between.
        position: Position at the last report; None until there are two reports.
        is_slow: Whether the other members wait for it.
        is_noted: Whether the user was warned.
        is_stuck: Whether it has stayed at its position for too long.
    """

    def __init__(self, name: str, now: float):
        self.name = name
        self.window: deque[tuple[float, WorkerFigures]] = deque()
        self.position: TaskReport | None = None
        self.is_slow = self.is_noted = self.is_stuck = False
        self._first_at = now

    def add(self, report: TaskReport, figures: WorkerFigures, now: float) -> None:
        if self.window and (self.window[-1][1].steps >= COMPILED_STEPS or now - self._first_at >= UNCOUNTED_S):
            self.position = report
        else:
            self.window.clear()  # it may still be compiling: nothing before this report counts
        self.window.append((now, figures))

    def restart(self) -> None:
        """Discard its figures. Its next report becomes the new baseline, so work between its last report and now does
        not count."""
        self.window.clear()
        self.position = None

    def gained(self, now: float) -> WorkerFigures:
        """Return its figures for the last seconds; for a silent task, the last ones that it reported."""
        # Check the second entry: the first may be older, so that the window covers at least WINDOW_S.
        while len(self.window) > 2 and self.window[1][0] < now - WINDOW_S:
            self.window.popleft()
        return self.window[-1][1].since(self.window[0][1]) if self.window else WorkerFigures()

    def silent_s(self, now: float) -> float:
        return now - self.window[-1][0] if self.position is not None else 0.0


class StragglerDetector:
    """Compares all members of a job, starting with their second step. Discards their figures when a member exits or
    joins, because the others have then waited for something else.

    Args:
        timeout_s: Seconds after which a member that stays at the same position is reported once.
    """

    def __init__(self, *, timeout_s: float = math.inf):
        self._timeout_s = timeout_s
        self._known: dict[str, _Member] = {}  # by task; only tasks that have reported figures
        self._training: Collection[str] | None = None  # None: all tasks
        self._noted_at = -math.inf  # time of the last warning about a slow member

    def use_members(self, tasks: Collection[str]) -> None:
        """Set the tasks that train. Other tasks that have started do not take part yet."""
        self._training = set(tasks)
        for task, member in self._known.items():
            member.restart()
            member.is_slow &= task in self._training

    def forget(self, task: str) -> None:
        """Remove a task whose process has exited."""
        members = self._members
        if self._known.pop(task, None) in members:
            for member in members:
                member.restart()

    @property
    def slow(self) -> list[str]:
        """Tasks that the others wait for."""
        return [task for task, member in self._known.items() if member.is_slow]

    @property
    def _members(self) -> list[_Member]:
        return [member for task, member in self._known.items() if self._training is None or task in self._training]

    def add(self, task: str, name: str, report: TaskReport, now: float) -> list[str]:
        """Record a report of a task, and return lines to show. Each change is reported once.

        Args:
            task: Task that sent the report.
            name: Display name of the task.
            report: The report.
            now: Seconds of a monotonic clock.
        """
        if report.figures is None:
            return []
        if task not in self._known:
            self._known[task] = _Member(name, now)
        self._known[task].add(report, report.figures, now)
        members = self._members
        gained = [member.gained(now) for member in members]
        lines = []
        for index, member in enumerate(members):
            others = gained[:index] + gained[index + 1 :]
            # Requires enough figures of all others; for a silent member, fewer suffice.
            if others and min(_known_s(other) for other in others) >= MIN_KNOWN_S:
                lines += self._compare(member, gained[index], others, now)
        return lines + [line for member in members for line in self._find_stuck(member)]

    def _compare(self, member: _Member, own: WorkerFigures, others: list[WorkerFigures], now: float) -> list[str]:
        silent_s = member.silent_s(now)
        computing = statistics.median(_computing(other) for other in others)
        computed_s = statistics.median(other.computed_s for other in others)
        is_known = _known_s(own) >= MIN_KNOWN_S
        if member.is_slow:
            keeps_up = is_known and not _exceeds(own, RECOVERED * computing, RECOVERED * computed_s)
            if silent_s < UNREPORTED_S and keeps_up:
                member.is_slow = False
                return [f"{member.name} recovered"] if member.is_noted else []
        elif 1 - computing >= MIN_WAITING:  # if the others do not wait, no member delays them
            if silent_s >= UNREPORTED_S:
                return self._note(member, f"has been silent for {silent_s:.0f} s, and the others wait for it", now)
            if is_known and _exceeds(own, SLOW * computing, SLOW * computed_s):
                difference = _describe_difference(own, others)
                return self._note(member, f"is slow, and the others wait for it: {difference}", now)
        return []

    def _note(self, member: _Member, what: str, now: float) -> list[str]:
        """Mark a member as slow. Members found at the same time are shown, then none for a while."""
        member.is_slow, member.is_noted = True, not 0 < now - self._noted_at < QUIET_S
        if not member.is_noted:
            return []
        self._noted_at = now
        return [f"{member.name} {what}"]

    def _find_stuck(self, member: _Member) -> list[str]:
        at, was_stuck = member.position, member.is_stuck
        member.is_stuck = at is not None and at.age_s >= self._timeout_s and at.phase != COLLECTIVE
        if at is None or was_stuck or not member.is_stuck:
            return []
        where = "" if at.epoch is None else f", {place(at.epoch, at.step)}"
        return [f"{member.name} is alive but has been at {at.phase}{where} for {at.age_s:.0f} s"]


def _known_s(figures: WorkerFigures) -> float:
    return figures.computed_s + figures.waited_s


def _computing(figures: WorkerFigures) -> float:
    """Fraction of the time that a member computes."""
    return figures.computed_s / _known_s(figures)


def _exceeds(own: WorkerFigures, fraction: float, seconds: float) -> bool:
    """Whether a member has computed more than both limits: as a fraction of its time, because its reports may cover
    more time than those of the others, and in seconds, because it may have gone silent. If no member computes, all of
    them wait for something else."""
    return own.computed_s >= max(fraction, MIN_WAITING) * _known_s(own) and own.computed_s >= seconds


def _describe_difference(own: WorkerFigures, others: list[WorkerFigures]) -> str:
    if own.steps and all(other.steps for other in others):
        mine = own.computed_s / own.steps
        theirs = statistics.median(other.computed_s / other.steps for other in others)
        if mine > theirs:  # otherwise it has taken more steps in the reported time
            return f"it computes for {_milliseconds(mine)} per step, the others for {_milliseconds(theirs)}"
    theirs = statistics.median(_computing(other) for other in others)
    return f"it computes for {_computing(own):.0%} of the time, the others for {theirs:.0%}"


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
