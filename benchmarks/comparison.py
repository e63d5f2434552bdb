"""The measurements of one run and the results: medians, ratios, whether bars are met."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.tools import ALL_REDUCE_BARS, SPEED_BARS, START_BARS
from benchmarks.work import WORKS


@dataclass(frozen=True)
class Measurement:
    """One job of one tool on one work, in one round.

    For an all-reduce, `tool` is the system, `work` is the case (a size in bytes), and a step is one call.
    """

    round: int
    tool: str
    work: str
    ms_per_step: list[float]
    first_step_s: float | None = None

    @property
    def ms(self) -> float:
        """Milliseconds per step: the median of the job's windows."""
        return statistics.median(self.ms_per_step)


@dataclass(frozen=True)
class Spread:
    """A median over rounds, with minimum and maximum."""

    median: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Verdict:
    """A bar and the measured value: a ratio of speeds, or seconds."""

    work: str
    tool: str
    against: str
    required: float
    measured: Spread
    unit: str
    note: str = ""

    @property
    def met(self) -> bool:
        if self.unit == "s":
            return self.measured.median <= self.required
        return self.measured.median >= self.required


@dataclass
class Comparison:
    """All results of `benchmarks.run`, as stored in results/*.json.

    Attributes:
        failures: Jobs that gave no figures, and why. Nothing is omitted silently.
    """

    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdicts": [asdict(each) | {"met": each.met} for each in self.verdicts()]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Comparison:
        values = {name: value for name, value in values.items() if name != "verdicts"}
        values["measurements"] = [Measurement(**each) for each in values["measurements"]]
        return cls(**values)

    def of(self, tool: str, work: str) -> list[Measurement]:
        return [each for each in self.measurements if (each.tool, each.work) == (tool, work) and each.ms_per_step]

    def ms(self, tool: str, work: str) -> Spread | None:
        """Milliseconds per step over the rounds; None if nothing was measured."""
        found = [each.ms for each in self.of(tool, work)]
        return Spread.of(found) if found else None

    def samples_per_s(self, tool: str, work: str) -> float | None:
        spread = self.ms(tool, work)
        return None if spread is None else 1e3 * WORKS[work].batch / spread.median

    def first_step_s(self, tool: str, work: str) -> Spread | None:
        found = [each.first_step_s for each in self.of(tool, work) if each.first_step_s is not None]
        return Spread.of(found) if found else None

    def ratio(self, tool: str, against: str, work: str) -> Spread | None:
        """Speed of `tool` relative to `against`, per round, so that noise of the machine that affects both in a round
        cancels out."""
        others = {each.round: each.ms for each in self.of(against, work)}
        found = [others[each.round] / each.ms for each in self.of(tool, work) if each.round in others]
        return Spread.of(found) if found else None

    def verdicts(self) -> list[Verdict]:
        """Return the bars that have a measurement."""
        return [*self._speed_verdicts(), *self._start_verdicts()]

    def _speed_verdicts(self) -> Iterable[Verdict]:
        for bar in (*SPEED_BARS, *ALL_REDUCE_BARS):
            measured = self.ratio(bar.tool, bar.against, bar.work)
            if measured is not None:
                yield Verdict(bar.work, bar.tool, bar.against, bar.factor, measured, "x", bar.note)

    def _start_verdicts(self) -> Iterable[Verdict]:
        for bar in START_BARS:
            measured = self.first_step_s(bar.tool, bar.work)
            if measured is not None:
                yield Verdict(bar.work, bar.tool, "", bar.seconds, measured, "s", "start of the job to the first step")
