"""The loop from one generation to the next, with a node that has no links."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster.member_links import GenerationNotFormedError
from phalanx.cluster.membership import Member, Membership
from phalanx.cluster.membership_messages import EntryAlreadyFinished, LossReport
from phalanx.elastic.generation_loop import (
    Position,
    form_next_generation,
    is_caused_by,
    join_generation,
    run_until_complete,
)
from phalanx.errors import CollectiveTimeoutError, LinkClosedError, MembershipChangedError, RendezvousError


class Node:
    """Forms generations; `failures` are raised one after the other instead."""

    def __init__(self, *failures: Exception, past: EntryAlreadyFinished | None = None):
        self.task = "worker/0"
        self.generation = 1
        self.reports: list[LossReport] = []
        self.links = SimpleNamespace(pop_unreachable=lambda: ["b1"] if len(self.reports) == 1 else [])
        self._failures, self._past = list(failures), past

    @property
    def membership(self) -> Membership:
        return Membership(self.generation, 0, (Member(0, self.task, "host", "", 1),))

    def join(self, entry: int) -> EntryAlreadyFinished | None:
        if self._past is None and self._failures:
            raise self._failures.pop(0)
        return self._past

    def regroup(self, report: LossReport) -> None:
        self.reports.append(report)
        self.generation += 1
        if self._failures:
            raise self._failures.pop(0)


class Work:
    """A participant; the first starts fail with `failures`."""

    def __init__(self, *failures: Exception):
        self.started = 0
        self.abandoned: list[Exception] = []
        self._failures = list(failures)

    def position(self) -> Position:
        return Position(7, True, False)

    def start(self) -> None:
        self.started += 1
        if self._failures:
            raise self._failures.pop(0)

    def abandon(self, error: Exception) -> None:
        self.abandoned.append(error)


def test_reports_until_a_generation_stands() -> None:
    node: Any = Node(GenerationNotFormedError("worker/1 cannot be reached"))
    work = Work(CollectiveTimeoutError("worker/1 did not come"))
    form_next_generation(node, work, LinkClosedError("closed"))
    assert [(r.generation, r.links_formed, r.timeout_text, r.unreachable) for r in node.reports] == [
        (1, True, "", []),
        (2, False, "", ["b1"]),
        (3, True, "worker/1 did not come", []),
    ]
    assert [type(error) for error in work.abandoned] == [
        LinkClosedError,
        GenerationNotFormedError,
        CollectiveTimeoutError,
    ]
    assert {(r.completed, r.at_step_boundary, r.needs_state) for r in node.reports} == {(7, True, False)}
    assert work.started == 2


def test_other_errors_end_the_loop() -> None:
    node: Any = Node(RendezvousError("the job has failed"))
    with pytest.raises(RendezvousError):
        form_next_generation(node, Work(), LinkClosedError("closed"))


def test_a_candidate_whose_first_generation_fails_reports() -> None:
    node: Any = Node(GenerationNotFormedError("another member was lost"))
    work = Work()
    assert join_generation(node, work, 0) is None
    assert [report.links_formed for report in node.reports] == [False]
    assert work.started == 1


def test_a_candidate_that_is_too_late_receives_the_result() -> None:
    node: Any = Node(past=EntryAlreadyFinished(3, b"result"))
    work = Work()
    assert join_generation(node, work, 3) == EntryAlreadyFinished(3, b"result")
    assert not work.started


class Program:
    """Counts what happens around the function."""

    def __init__(self) -> None:
        self.synchronized: list[bool] = []

    def synchronize(self, *, has_changed: bool) -> None:
        self.synchronized.append(has_changed)

    def recover(self, error: Exception) -> bool:
        return is_caused_by(error, MembershipChangedError)


def test_a_function_is_repeated_until_it_returns() -> None:
    errors: list[Exception] = [MembershipChangedError("left"), ValueError("wrapped MembershipChangedError: joined")]
    program = Program()

    def function() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    assert run_until_complete(function, program) == "done"
    assert program.synchronized == [False, True, True]


def test_other_errors_of_a_function_are_raised() -> None:
    def function() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_until_complete(function, Program())
