"""When the stall inspector warns and when it ends the job, by a clock that is set by hand."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from phalanx.errors import CollectiveTimeoutError
from phalanx.horovod.operation_request import Request
from phalanx.horovod.stall_inspector import Stall, StallInspector

NAMES = ["worker/0", "worker/1", "worker/2"]


class Asked(NamedTuple):
    request: Request
    requested_at: float


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def asked(name: str, at: float) -> Asked:
    return Asked(Request(name, "allreduce", ("float32",), ((2,),), "Sum"), at)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inspector(clock: Clock) -> StallInspector:
    return StallInspector(60.0, 600.0, NAMES, clock)


def test_who_does_not_come_is_named_once_after_the_first_limit(inspector: StallInspector, clock: Clock) -> None:
    waiting, absent = {"grad": asked("grad", clock.now)}, {"grad": [1, 2]}
    clock.now += 59.0
    assert not inspector.needs_full_exchange(waiting.values())
    assert inspector.inspect(waiting, absent) == []
    clock.now += 2.0
    assert inspector.needs_full_exchange(waiting.values())
    assert inspector.inspect(waiting, absent) == [Stall("grad", [1, 2])]
    assert not inspector.needs_full_exchange(waiting.values())
    assert inspector.inspect(waiting, absent) == []
    assert inspector.describe_ranks([1, 2]) == "rank 1 (worker/1) and rank 2 (worker/2)"


def test_the_job_ends_after_the_second_limit_of_any_rank_with_the_names(
    inspector: StallInspector, clock: Clock
) -> None:
    waiting, absent = {"grad": asked("grad", clock.now)}, {"grad": [2]}
    clock.now += 61.0
    assert inspector.inspect(waiting, absent) != []
    clock.now += 538.0
    assert not inspector.needs_full_exchange(waiting.values())
    assert inspector.overdue(waiting.values()) == {}
    clock.now += 2.0
    assert inspector.needs_full_exchange(waiting.values())
    overdue = inspector.overdue(waiting.values())
    assert overdue == {"grad": 601.0}
    with pytest.raises(
        CollectiveTimeoutError, match=r"'grad' has waited 601 s on rank 1 \(worker/1\) for rank 2 \(worker/2\)"
    ):
        inspector.raise_if_overdue([{}, overdue, {}], absent)


def test_what_has_come_meanwhile_is_not_overdue(inspector: StallInspector) -> None:
    inspector.raise_if_overdue([{"grad": 601.0}, {}, {}], {"other": [2]})


def test_an_operation_that_came_may_be_warned_of_again(inspector: StallInspector, clock: Clock) -> None:
    for _ in range(2):
        waiting = {"grad": asked("grad", clock.now)}
        clock.now += 61.0
        assert inspector.inspect(waiting, {"grad": [0]}) == [Stall("grad", [0])]
        inspector.forget("grad")


def test_what_this_rank_does_not_wait_for_is_the_others_to_tell(inspector: StallInspector, clock: Clock) -> None:
    clock.now += 10_000.0
    assert inspector.inspect({}, {"grad": [0]}) == []


def test_without_warnings_the_end_comes_all_the_same(clock: Clock) -> None:
    inspector = StallInspector(math.inf, 5.0, NAMES, clock)
    waiting = {"grad": asked("grad", clock.now)}
    clock.now += 4.0
    assert not inspector.needs_full_exchange(waiting.values())
    clock.now += 2.0
    assert inspector.needs_full_exchange(waiting.values())
    assert inspector.inspect(waiting, {"grad": [1]}) == []
    assert inspector.overdue(waiting.values()) == {"grad": 6.0}
