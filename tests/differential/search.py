"""Searches for programs that replicas run otherwise than plain Keras."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase

from tests.differential.comparison import differences
from tests.differential.pool import Pool, Result
from tests.differential.programs import Program, programs
from tests.differential.worker import REFUSALS, Outcome

NOISES = (None, *range(1, 12))
"""Many, because some optimizers make of a gradient that is zero, but for rounding, a step of full size, and its sign
may be the same in the first few."""
ECHOES = ("PeerLostError", "LinkClosedError", "CollectiveTimeoutError")
RELATING = (
    "would not compute what one process does",
    "cannot be merged over the replicas",
    "is neither a mean nor a sum",
)
"""Parts of errors about samples that are related to each other, which the programs of the search never do."""
OVERFLOWING_APART = re.compile(
    r"Wrapped\(|Network\(|Stepping\(|Attention\(|LSTM\(|GRU\(|RNN\(|Bidirectional\(|TimeDistributed\(|\(layers\.Layer\)"
)
"""Parts of programs whose gradients may overflow for all samples together and for no replica's: see "at the edge of
overflow" in docs/concepts/numbers.md."""
Progress = Callable[[Program, str, float], None]


class Different(AssertionError):
    """Replicas did otherwise than plain Keras.

    Attributes:
        kind: what differs.
        before: the programs without which nothing differs.
    """

    def __init__(self, kind: str, details: str, before: Sequence[str] = ()):
        super().__init__(details)
        self.kind = kind
        self.before = tuple(before)


@dataclass
class Tally:
    """What became of the programs of a search.

    Attributes:
        outcomes: how many were equal, refused, and so on.
        refusals: how many were refused for which reason.
        invalid: how many plain Keras itself did not run.
        findings: how many programs failed in which way.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    invalid: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [
            f"{sum(self.outcomes.values())} programs: "
            + ", ".join(f"{n} {name}" for name, n in self.outcomes.most_common())
        ]
        for title, counter in (
            ("refused", self.refusals),
            ("not run by plain Keras", self.invalid),
            ("FOUND", self.findings),
        ):
            lines += [f"  {title} {count}: {reason}" for reason, count in counter.most_common()]
        return "\n".join(lines)


class Judge:
    """Runs a program and raises `Different` if replicas did not do what plain Keras did."""

    def __init__(self, pool: Pool, tally: Tally, progress: Progress | None):
        self._pool = pool
        self._tally = tally
        self._progress = progress

    def check(self, program: Program) -> None:
        began = time.monotonic()
        verdict = "different"
        try:
            verdict = self._repeated(program)
        finally:
            self._tally.outcomes[verdict] += 1
            if self._progress:
                self._progress(program, verdict, time.monotonic() - began)

    def _repeated(self, program: Program) -> str:
        try:
            return self._verdict(program, self._pool.run(program.source, program.world_size))
        except Different as first:
            # What another program has left behind in the processes is a fault as well, but not one of this program.
            before = self._pool.sources[:-1]
            self._pool.renew()
            verdict = self._verdict(program, self._pool.run(program.source, program.world_size))
            raise Different(
                f"{verdict} without the programs before, after them {first.kind}", str(first), before
            ) from None

    def _verdict(self, program: Program, result: Result) -> str:
        if result.plain is None:
            return "not finished by plain Keras"
        if result.plain.error is not None:
            self._tally.invalid[_reason(result.plain)] += 1
            return "not run by plain Keras"
        ranks = self._finished(result)
        if all(rank.is_refused for rank in ranks):
            _, message, text = ranks[0].error or ("", "", "")
            if any(part in message for part in RELATING):
                if self._rests_on_rounding(program, result.plain):
                    return "refused, as rounding errors alone change its numbers"
                raise Different(f"refused without need: {_reason(ranks[0])}", text)
            self._tally.refusals[_reason(ranks[0])] += 1
            return self._compare_what_there_is(program, result.plain, ranks) or "refused"
        failed = [(rank, rank.error) for rank in ranks if rank.error is not None]
        if failed:
            # The cause first, not its echo on the other ranks.
            first, (kind, _, _) = min(failed, key=lambda each: each[1][0] in ECHOES)
            late = " after steps were taken" if first.steps and kind in REFUSALS else ""
            raise Different(f"crash{late}: {_reason(first)}", "\n".join(text for _, (_, _, text) in failed))
        return self._compare_what_there_is(program, result.plain, ranks) or "equal"

    def _finished(self, result: Result) -> list[Outcome]:
        ranks = [rank for rank in result.ranks if rank is not None]
        if len(ranks) < len(result.ranks):
            missing = [rank for rank, outcome in enumerate(result.ranks) if outcome is None]
            said = "\n".join(rank.error[2] for rank in ranks if rank.error)
            raise Different(
                "hang or sudden death",
                f"ranks {missing} did not finish\n{said}\n{self._pool.log(len(result.ranks))[-3000:]}",
            )
        return ranks

    def _compare_what_there_is(self, program: Program, plain: Outcome, ranks: list[Outcome]) -> str | None:
        for number, rank in enumerate(ranks[1:], 1):
            for label, values in rank.values.items():
                if found := differences(values, ranks[0].values[label], 0.0):
                    raise Different(
                        f"ranks differ in {_kind(label, found)}", f"rank {number} and rank 0, {label}{found[0]}"
                    )
        runs: list[Outcome | None] = []
        for label, values in ranks[0].values.items():
            if label not in plain.values:
                raise Different("other labels", f"{list(ranks[0].values)} instead of {list(plain.values)}")
            expected = plain.values[label]
            found = differences(values, expected, program.tolerance)
            noise: list[Any] = []
            again = self._noise(program, runs)
            while found and (run := next(again, None)):
                if label not in run.values:
                    continue
                noise.append(run.values[label])
                if len(noise) == 1 and differences(noise[0], expected, program.tolerance):
                    return "not repeatable in plain Keras"
                found = differences(values, expected, program.tolerance, noise)
            if found and _skips_other_steps(program, plain, ranks[0]):
                return "at the edge of overflow"
            if found:
                listed = "\n".join(f"  {label}{each}" for each in found[:12])
                raise Different(f"numbers: {_kind(label, found)}", listed)
        return None

    def _rests_on_rounding(self, program: Program, plain: Outcome) -> bool:
        """Whether plain Keras does not repeat its numbers with other rounding errors. The gradients of a cosine of one
        element, for example, are nothing else, and an adaptive optimizer scales them up to steps of full size."""
        return any(
            differences(values, plain.values[label], program.tolerance)
            for run in self._noise(program, [])
            for label, values in run.values.items()
            if label in plain.values
        )

    def _noise(self, program: Program, runs: list[Outcome | None]) -> Iterator[Outcome]:
        """Runs of plain Keras: as it is, then driven by rounding errors. One after the other, as each takes as long as
        the program and may explain what differs; `runs` keeps them for what else may differ."""
        for number, seed in enumerate(NOISES):
            if number == len(runs):
                runs.append(self._pool.plain_again(program.source, seed))
            if (run := runs[number]) is not None and run.error is None:
                yield run


def _skips_other_steps(program: Program, plain: Outcome, rank: Outcome) -> bool:
    """Whether gradients in float16 have overflowed in plain Keras and not on the replicas, where that is documented."""
    if "'mixed_float16'" not in program.source or not OVERFLOWING_APART.search(program.source):
        return False
    place = " iterations"
    common = [(values, plain.values[label]) for label, values in rank.values.items() if label in plain.values]
    return any(place in ours and ours[place] > theirs.get(place, np.inf) for ours, theirs in common)


def _reason(outcome: Outcome) -> str:
    assert outcome.error is not None
    kind, message, _ = outcome.error
    return f"{kind}: {re.sub(r'[0-9]+', '#', message.strip())[:160]}".replace("\n", " ")


def _kind(label: str, found: list[str]) -> str:
    place = found[0].partition(":")[0]
    return re.sub(r"[0-9]+", "#", f"{label.partition('. ')[2]}{place}")


def search(
    pool: Pool,
    backend: str,
    *,
    seed: int,
    examples: int,
    until: float,
    report: Callable[[Program, Different], None],
    shrink_s: float = 0.0,
    progress: Progress | None = None,
) -> Tally:
    """Run programs until there were so many, or the time is over.

    Args:
        until: `time.monotonic()` after which no program starts.
        report: called for each finding, once for each kind.
        shrink_s: how long to look for a smaller program that fails.
    """
    tally = Tally()
    judge = Judge(pool, tally, progress)
    while examples > 0 and time.monotonic() < until:
        count = min(examples, 100)
        examples -= count
        one = _Round(judge, tally, until, shrink_s)
        if failure := one.run(backend, seed, count):
            report(*failure)
        seed += 1
    return tally


class _Round:
    """One seed's programs, up to the first that fails in a way of its own."""

    def __init__(self, judge: Judge, tally: Tally, until: float, shrink_s: float):
        self._judge = judge
        self._tally = tally
        self._until = until
        self._shrink_s = shrink_s
        self._verdicts: dict[Program, Different | None] = {}
        self._found: tuple[Program, Different] | None = None
        self._shrink_until = 0.0

    def run(self, backend: str, seed: int, count: int) -> tuple[Program, Different] | None:
        phases = [Phase.generate, *([Phase.shrink] if self._shrink_s else [])]

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            derandomize=False,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(programs(backend))
        def judged(program: Program) -> None:
            self._check(program)

        with contextlib.suppress(Different):
            judged()
        if self._found:
            self._tally.findings[self._found[1].kind] += 1
        return self._found

    def _check(self, program: Program) -> None:
        if program not in self._verdicts:
            late = self._shrink_until if self._found else self._until
            if time.monotonic() > late:
                return
            self._verdicts[program] = self._judged(program)
        if failure := self._verdicts[program]:
            if not self._found:
                self._shrink_until = time.monotonic() + self._shrink_s
            self._found = program, failure
            raise failure

    def _judged(self, program: Program) -> Different | None:
        try:
            self._judge.check(program)
        except Different as failure:
            if self._found is None and failure.kind in self._tally.findings:
                self._tally.findings[failure.kind] += 1
                return None
            if self._found is not None and failure.kind != self._found[1].kind:
                return None  # shrinking shall not slip into another fault
            return failure
        return None
