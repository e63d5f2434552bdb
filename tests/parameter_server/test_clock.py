"""The clock by which servers leave workers out."""

from __future__ import annotations

import pytest

from phalanx.parameter_server.server.running_clock import MAX_TICK_S, RunningClock


def test_it_goes_with_the_time_while_it_is_ticked() -> None:
    now = [100.0]
    clock = RunningClock(lambda: now[0])
    for _ in range(20):
        now[0] += 0.5
        clock.tick()
    assert clock() == pytest.approx(10.0)
    now[0] += 0.25
    assert clock() == pytest.approx(10.25)


def test_a_stop_counts_for_a_moment_only_and_the_clock_never_goes_back() -> None:
    now = [100.0]
    clock = RunningClock(lambda: now[0])
    now[0] += 3600.0
    before_the_tick = clock()
    assert before_the_tick == MAX_TICK_S
    clock.tick()
    assert clock() == before_the_tick
    now[0] += 0.5
    assert clock() == before_the_tick + 0.5
