"""Detects stragglers by comparing how long each member computes and waits. Pure bookkeeping; time is an argument.

All members take the same steps together, so a step takes the same time on all of them, but they divide it differently:
a slow member computes while the others wait. It is a *straggler* if, over some seconds, it computes at least `SLOW`
times as long as the median of the others, and these wait for a good part of the time. If no member waits, there is no
straggler, however different the members are. Timings arrive twice a second, so detection costs a step nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW_S = 10.0
"""Members are compared over this time. Long compared with what a single member does now and then, such as saving."""
MIN_KNOWN_S = 4.0
"""At least this much time must be known of each member."""
SLOW = 1.5
"""A member that computes this many times as long as the others is a straggler."""
RECOVERED = 1.25
"""A straggler has recovered below this factor. Less than `SLOW`, so that small fluctuations are not reported."""
MIN_WAITING = 0.2
"""The fraction of the time that the other members must spend waiting."""
SILENT_S = 5.0
"""A member that sends nothing for this long while others wait is stopped, or its host is overloaded."""

COLLECTIVE = "all_reduce"
"""The phase of a member that waits for others. It is not reported as stuck; the member it waits for is."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The position of a process in the program, and its recent timings.

    Attributes:
        phase, epoch, step: the position, as in `runtime.progress`.
        age_s: seconds since it reached this position.
        computed_s, waited_s: seconds outside of collectives and inside them, since the previous timing.
        steps: steps since the previous timing.
    """

    phase: str = ""
    epoch: int | None = None
    step: int | None = None
    age_s: float = 0.0
    computed_s: float = 0.0
    waited_s: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Sums:
    computed_s: float
    waited_s: float
    steps: int

    @property
    def known_s(self) -> float:
        return self.computed_s + self.waited_s

    @property
    def computing(self) -> float:
        return self.computed_s / self.known_s


class StragglerDetector:
    """Compares the timings of all members.

    Args:
        timeout_s: a member that stays at the same position for this many seconds is reported once.
    """

    def __init__(self, *, timeout_s: float = float("inf")):
        self._timeout_s = timeout_s
        self._timings: dict[str, deque[tuple[float, StepTiming]]] = {}
        self._generation = 0
        self._slow: set[str] = set()
        self._stuck: set[str] = set()

    def add(self, member: str, timing: StepTiming, now: float) -> None:
        """Record a timing of a member or of a candidate."""
        self._timings.setdefault(member, deque()).append((now, timing))

    def is_slow(self, member: str) -> bool:
        """Whether `detect` has found that the others wait for this member."""
        return member in self._slow

    def detect(self, names: Mapping[str, str], generation: int, now: float) -> list[str]:
        """Lines to report now; each change is reported once.

        Args:
            names: the names of the members, as shown to people.
            generation: the generation of the job; timings of former generations are discarded.
            now: seconds of a steady clock.
        """
        if generation != self._generation:
            self._generation = generation
            self._timings = {member: deque() for member in names}
            self._slow &= set(names)
        for timings in self._timings.values():
            while len(timings) > 1 and timings[0][0] < now - WINDOW_S:
                timings.popleft()
        sums = {member: self._sums(member) for member in names}
        lines = []
        for member, name in names.items():
            others = [sums[other] for other in names if other != member]
            if others and min(other.known_s for other in others) >= MIN_KNOWN_S:
                lines += self._compare(member, name, sums[member], others, now)
        return lines + self._find_stuck(names)

    def _compare(self, member: str, name: str, own: _Sums, others: list[_Sums], now: float) -> list[str]:
        timings = self._timings.get(member)
        silent_s = now - timings[-1][0] if timings else 0.0
        computing = statistics.median(other.computing for other in others)
        computed_s = statistics.median(other.computed_s for other in others)
        is_known = own.known_s >= MIN_KNOWN_S
        if member in self._slow:
            if silent_s < SILENT_S and is_known and not _exceeds(own, RECOVERED * computing, RECOVERED * computed_s):
                self._slow.discard(member)
                return [f"{name} recovered"]
        elif 1 - computing >= MIN_WAITING:
            if silent_s >= SILENT_S:
                self._slow.add(member)
                return [f"{name} has been silent for {silent_s:.0f} s, and the others wait for it"]
            if is_known and _exceeds(own, SLOW * computing, SLOW * computed_s):
                self._slow.add(member)
                return [f"{name} is slow, and the others wait for it: {_describe_difference(own, others)}"]
        return []

    def _find_stuck(self, names: Mapping[str, str]) -> list[str]:
        lines = []
        for member, name in names.items():
            timings = self._timings.get(member)
            timing = timings[-1][1] if timings else StepTiming()
            if timing.age_s < self._timeout_s or timing.phase == COLLECTIVE:
                self._stuck.discard(member)
            elif member not in self._stuck:
                self._stuck.add(member)
                where = "" if timing.epoch is None else f", epoch {timing.epoch}, step {timing.step}"
                lines.append(f"{name} is alive but has been at {timing.phase}{where} for {timing.age_s:.0f} s")
        return lines

    def _sums(self, member: str) -> _Sums:
        timings = [timing for _, timing in self._timings.get(member, ())]
        return _Sums(
            sum(timing.computed_s for timing in timings),
            sum(timing.waited_s for timing in timings),
            sum(timing.steps for timing in timings),
        )


def _exceeds(own: _Sums, fraction: float, seconds: float) -> bool:
    """Whether a member has computed more than this: both as a fraction of its time, because more may be known of it
    than of the others, and in seconds, because it may have fallen silent. If no member computes, all of them wait for
    something else."""
    return own.computed_s >= max(fraction, MIN_WAITING) * own.known_s and own.computed_s >= seconds


def _describe_difference(own: _Sums, others: list[_Sums]) -> str:
    if own.steps and all(other.steps for other in others):
        mine = own.computed_s / own.steps
        theirs = statistics.median(other.computed_s / other.steps for other in others)
        if mine > theirs:  # otherwise it has taken more steps in the time that is known
            return f"it computes for {_milliseconds(mine)} per step, the others for {_milliseconds(theirs)}"
    theirs = statistics.median(other.computing for other in others)
    return f"it computes for {own.computing:.0%} of the time, the others for {theirs:.0%}"


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
