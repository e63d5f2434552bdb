"""How a job is ended: states, transitions and schedules, without a job."""

from __future__ import annotations

import signal

import pytest

from phalanx.launcher.shutdown import (
    TRANSITIONS,
    JobState,
    ShutdownPlan,
    ShutdownStep,
    Trigger,
    after_failure,
    after_signal,
)

GRACE_S, CHECKPOINT_S = 4.0, 30.0


def plan() -> ShutdownPlan:
    return ShutdownPlan(GRACE_S, CHECKPOINT_S)


def steps_until(plan: ShutdownPlan, end: float) -> list[ShutdownStep]:
    found = []
    while (step := plan.pop_due_step(end)) is not None:
        found.append(step)
    return found


def test_every_state_but_the_last_can_be_left_and_none_leads_back() -> None:
    assert set(TRANSITIONS) == set(JobState)
    for state in set(JobState) - {JobState.TERMINATING}:
        assert set(TRANSITIONS[state].values()) - {state}
    assert set(TRANSITIONS[JobState.TERMINATING].values()) == {JobState.TERMINATING}
    order = list(JobState)
    for state, events in TRANSITIONS.items():
        assert all(order.index(to) >= order.index(state) for to in events.values())


@pytest.mark.parametrize(
    "schedule", [after_failure(10.0), after_signal(10.0, signal.SIGINT), after_signal(10.0, signal.SIGTERM)]
)
def test_steps_are_in_order_and_the_last_ones_are_kill_and_give_up(schedule) -> None:
    times = [time for time, _ in schedule]
    assert times == sorted(times)
    assert times[0] >= 10.0
    assert [step for _, step in schedule][-2:] == [ShutdownStep.KILL, ShutdownStep.ABANDON]


def test_the_first_reason_stays_the_reason() -> None:
    failed = plan()
    assert failed.fail(0.0)
    failed.request_stop(signal.SIGINT)
    failed.handle_signals(1.0)
    assert (failed.state, failed.interrupted_by) == (JobState.FAILING, None)
    stopped = plan()
    stopped.request_stop(signal.SIGTERM)
    stopped.handle_signals(0.0)
    assert not stopped.fail(1.0)
    assert stopped.interrupted_by == signal.SIGTERM


def test_a_signal_counts_as_soon_as_it_is_received() -> None:
    stopped = plan()
    stopped.request_stop(signal.SIGTERM)
    assert stopped.is_shutting_down
    assert not stopped.has_begun


@pytest.mark.parametrize(("number", "until"), [(signal.SIGTERM, 31.0), (signal.SIGINT, 7.3)])
def test_only_a_preemption_waits_for_a_checkpoint(number: int, until: float) -> None:
    stopped = plan()
    stopped.request_stop(number)
    stopped.handle_signals(0.0)
    steps_until(stopped, 1.0)
    stopped.allow_checkpoint(1.0)
    steps_until(stopped, until - 0.1)
    assert ShutdownStep.KILL in steps_until(stopped, until)


def test_exits_are_the_launchers_doing_from_the_first_signal_on() -> None:
    failed = plan()
    failed.fail(0.0)
    assert steps_until(failed, GRACE_S) == [ShutdownStep.DUMP_STACKS]
    assert not failed.has_signaled
    assert steps_until(failed, GRACE_S + 1) == [ShutdownStep.TERMINATE]
    assert failed.has_signaled


def test_optional_tasks_are_ended_when_their_time_is_over() -> None:
    finishing = plan()
    finishing.set_optional_deadline(0.0, 5.0)
    assert finishing.next_due == 5.0
    assert not finishing.check_overdue(4.9)
    assert not finishing.is_shutting_down
    assert finishing.check_overdue(5.0)
    assert steps_until(finishing, 5.0) == [ShutdownStep.TERMINATE]


def test_events_outside_the_table_change_nothing() -> None:
    for state, events in TRANSITIONS.items():
        for event in set(Trigger) - set(events):
            other = plan()
            other.state = state
            assert not other._apply(event, ())
            assert other.state is state
