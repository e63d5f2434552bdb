"""Who is slow: what each member says of its computing and waiting, compared. Plain bookkeeping, with the time given.

All members take the same steps together, so they need the same time for them, but they divide it differently: a slow
one computes while the others wait. It is a *straggler* when, over some seconds, it computes at least `SLOW` times as
long as the others do in the median, and these wait for a good part of the time. A job in which nobody waits has no
straggler, however unequal its members are. A pulse comes twice a second, so all this costs a step nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

WINDOW_S = 10.0
"""Over which members are compared. Long against what only one member does from time to time, such as to save."""
LEAST_S = 4.0
"""So much of it must be known."""
SLOW = 1.5
"""Computing so many times as long as the others makes a straggler."""
WELL = 1.25
"""Computing less than so many times as long, it is none any more. Less than `SLOW`, so that nothing is said at each
wobble."""
WAITING = 0.2
"""The part of the time that the others must wait."""
SILENT_S = 5.0
"""A member that has not been heard of for so long, while others wait, is stopped, or its host is overloaded."""

COLLECTIVE = "all_reduce"
"""The phase of one that waits for others, who are then told of."""


class StepTiming(msgspec.Struct, frozen=True, tag="pulse"):
    """The sender lives, and this is how far it has come.

    Attributes:
        phase, epoch, step: as in `launcher.progress`.
        age_s: seconds since it came there.
        steps_per_s: over the last seconds; 0 where not known.
        computed_s, waited_s: seconds since the pulse before, outside of collectives and in them.
        steps: taken since then.
    """

    phase: str = ""
    epoch: int | None = None
    step: int | None = None
    age_s: float = 0.0
    steps_per_s: float = 0.0
    computed_s: float = 0.0
    waited_s: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class StragglerReport:
    """Seconds for each step, outside of collectives and in them."""

    compute_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class _Sums:
    computed_s: float
    waited_s: float
    steps: int

    @property
    def known_s(self) -> float:
        return self.computed_s + self.waited_s


class StragglerDetector:
    """Args:
    timeout_s: a member that has been at the same place for so long is told of, once.
    """

    def __init__(self, *, timeout_s: float = float("inf")):
        self._timeout_s = timeout_s
        self._pulses: dict[str, deque[tuple[float, StepTiming]]] = {}
        self._generation = 0
        self._slow: set[str] = set()
        self._stuck: set[str] = set()

    def hear(self, member: str, pulse: StepTiming, now: float) -> None:
        """A member, or one that is to become one, has said how it goes."""
        self._pulses.setdefault(member, deque()).append((now, pulse))

    def pace(self, member: str) -> StragglerReport | None:
        """How long a member's steps take; None where it has taken none lately."""
        sums = self._sums(member)
        return StragglerReport(sums.computed_s / sums.steps, sums.waited_s / sums.steps) if sums.steps else None

    def is_slow(self, member: str) -> bool:
        """Whether the others wait for it, as far as `judge` has found."""
        return member in self._slow

    def judge(self, names: Mapping[str, str], generation: int, now: float) -> list[str]:
        """What is to be said now; each thing once.

        Args:
            names: of the members, for people.
            generation: of the job; with a new one all begins anew.
        """
        if generation != self._generation:
            self._generation = generation
            self._pulses = {member: deque() for member in names}
            self._slow &= set(names)
        for pulses in self._pulses.values():
            while len(pulses) > 1 and pulses[0][0] < now - WINDOW_S:
                pulses.popleft()
        said = self._judge_paces(names, now)
        return said + self._judge_places(names)

    def _judge_paces(self, names: Mapping[str, str], now: float) -> list[str]:
        said = []
        sums = {member: self._sums(member) for member in names}
        for member, name in names.items():
            others = [sums[other] for other in names if other != member]
            if not others or min(other.known_s for other in others) < LEAST_S:
                continue
            own, silent_s = sums[member], self._silent_s(member, now)
            computed = statistics.median(other.computed_s / other.known_s for other in others)
            computed_s = statistics.median(other.computed_s for other in others)
            if member not in self._slow:
                waited_for = 1 - computed >= WAITING
                if waited_for and silent_s >= SILENT_S:
                    self._slow.add(member)
                    said.append(f"{name} has not been heard of for {silent_s:.0f} s, and the others wait for it")
                elif waited_for and own.known_s >= LEAST_S and _is_more(own, SLOW * computed, SLOW * computed_s):
                    self._slow.add(member)
                    said.append(f"{name} is slow, and the others wait for it: {_compared(own, others)}")
            elif (
                silent_s < SILENT_S and own.known_s >= LEAST_S and not _is_more(own, WELL * computed, WELL * computed_s)
            ):
                self._slow.discard(member)
                said.append(f"{name} keeps pace again")
        return said

    def _judge_places(self, names: Mapping[str, str]) -> list[str]:
        said = []
        for member, name in names.items():
            pulses = self._pulses.get(member)
            pulse = pulses[-1][1] if pulses else StepTiming()
            if pulse.age_s < self._timeout_s or pulse.phase == COLLECTIVE:
                self._stuck.discard(member)
            elif member not in self._stuck:
                self._stuck.add(member)
                where = "" if pulse.epoch is None else f", epoch {pulse.epoch}, step {pulse.step}"
                said.append(f"{name} lives, and has been at {pulse.phase}{where} for {pulse.age_s:.0f} s")
        return said

    def _silent_s(self, member: str, now: float) -> float:
        pulses = self._pulses.get(member)
        return now - pulses[-1][0] if pulses else 0.0

    def _sums(self, member: str) -> _Sums:
        pulses = [pulse for _, pulse in self._pulses.get(member, ())]
        return _Sums(
            sum(pulse.computed_s for pulse in pulses),
            sum(pulse.waited_s for pulse in pulses),
            sum(pulse.steps for pulse in pulses),
        )


def _is_more(own: _Sums, part: float, seconds: float) -> bool:
    """Whether a member has computed more than that: of its time, as it may be known for longer than others, and in
    seconds, as it may have fallen silent. Where nobody computes, all wait for something else."""
    return own.computed_s >= max(part, WAITING) * own.known_s and own.computed_s >= seconds


def _compared(own: _Sums, others: list[_Sums]) -> str:
    if own.steps and all(other.steps for other in others):
        mine = own.computed_s / own.steps
        theirs = statistics.median(other.computed_s / other.steps for other in others)
        if mine > theirs:  # else it has made more steps in the time that is known of
            return f"it computes {_ms(mine)} a step, they {_ms(theirs)}"
    theirs = statistics.median(other.computed_s / other.known_s for other in others)
    return f"it computes {own.computed_s / own.known_s:.0%} of the time, they {theirs:.0%}"


def _ms(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
