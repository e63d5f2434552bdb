"""While the chief saves, no worker makes a step; managed sessions begin when the chief is ready. Without processes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import CollectiveTimeoutError, PeerLostError, RendezvousError
from phalanx.parameter_server.server.chief_broadcasts import ChiefBroadcasts
from phalanx.parameter_server.server_messages import EpochOver, FitOver
from phalanx.training.servers.parameter_server_worker import SESSION, ParameterServerWorker
from tests.launcher.conftest import wait_until
from tests.parameter_server.test_schedule import (
    BOUND_S,
    NAMES,
    at_hand,
    begun,
    request_ticket,
    rules,
    schedule_of,
    take,
)

SHORT_S = 0.1


def runs(future: Future[Any]) -> bool:
    """Whether it still waits after a moment."""
    return not wait([future], SHORT_S).done


def test_the_chief_waits_until_the_steps_of_others_are_made_and_no_more_begin() -> None:
    schedule = begun(5)
    own, others = take(schedule, 0), take(schedule, 1)
    with ThreadPoolExecutor() as pool:
        held = pool.submit(schedule.hold_steps, BOUND_S)
        wait_until(lambda: schedule.fit.is_on_hold)
        assert runs(held)
        assert at_hand(schedule, 1) is None
        schedule.complete_step(others)
        held.result(BOUND_S)
        waiting = pool.submit(request_ticket, schedule, 1)
        assert runs(waiting), "no step begins"
        schedule.resume_steps()
        assert waiting.result(BOUND_S).batch == 2
    schedule.complete_step(own)


def test_the_end_of_the_epoch_comes_after_it() -> None:
    schedule = begun(1)
    schedule.complete_step(take(schedule, 0))
    schedule.hold_steps(BOUND_S)
    schedule.resume_steps()
    assert isinstance(request_ticket(schedule, 1), EpochOver)


def test_one_that_does_not_finish_its_step_is_left_out() -> None:
    schedule = begun(5)
    take(schedule, 1)
    schedule.hold_steps(SHORT_S)
    assert schedule.members.table.is_evicted("incarnation 1")
    schedule.resume_steps()
    assert take(schedule, 0).batch == 0, "its batch goes to another"


def test_steps_that_all_make_together_do_not_begin_either() -> None:
    schedule = begun(5, synchronous=True)
    first = [take(schedule, worker) for worker in (0, 1)]
    schedule.hold_steps(BOUND_S)
    schedule.complete_step(first[0])
    assert at_hand(schedule, 1) is None
    schedule.resume_steps()
    assert take(schedule, 1).batch == 1


@pytest.mark.parametrize("end", ["it is lost", "it starts over"])
def test_a_chief_that_does_not_come_back_from_it_holds_nobody_up(end: str) -> None:
    schedule = begun(5)
    schedule.hold_steps(BOUND_S)
    if end == "it is lost":
        schedule.members.detach(0, "incarnation 0")
        assert take(schedule, 1).batch == 0
    else:
        schedule.begin_fit(rules(), 0)
        schedule.open_epoch(0, 0, 5, None)
        assert schedule.next_ticket(1, "incarnation 1", 0, 0, schedule.fit.era, BOUND_S).batch == 0


def test_a_chief_that_is_lost_meanwhile_leaves_nobody_out() -> None:
    schedule = begun(5)
    own = take(schedule, 1)
    with ThreadPoolExecutor() as pool:
        held = pool.submit(schedule.hold_steps, 20 * SHORT_S)
        assert runs(held)
        schedule.members.detach(0, "incarnation 0")
        held.result(BOUND_S)
    assert not schedule.members.table.is_evicted("incarnation 1")
    schedule.complete_step(own)


def test_the_global_step_goes_on_from_a_checkpoint_and_never_back() -> None:
    schedule = schedule_of(NAMES[:1], start_timeout_s=BOUND_S)
    schedule.begin_fit(rules(), 0, 1000)
    assert schedule.global_step == 1000
    schedule.begin_fit(rules(), 1, 10)
    assert schedule.global_step == 1000


# Managed sessions.


def test_a_session_begins_on_others_when_it_has_on_the_chief() -> None:
    broadcasts = ChiefBroadcasts(begun(1).members)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(broadcasts.wait_for_broadcast, SESSION, 0)
        assert runs(other)
        broadcasts.broadcast(SESSION, 0, [], keep_first=False)
        other.result(BOUND_S)
        later = pool.submit(broadcasts.wait_for_broadcast, SESSION, 1)
        assert runs(later), "the next session is another one"
        broadcasts.broadcast(SESSION, 1, [], keep_first=False)
        later.result(BOUND_S)
    broadcasts.wait_for_broadcast(SESSION, 0)  # one that was started again does not wait


def test_a_chief_that_does_not_begin_its_session_is_named() -> None:
    schedule = schedule_of(NAMES[:2], start_timeout_s=SHORT_S)
    broadcasts = ChiefBroadcasts(schedule.members)
    schedule.members.attach(1, "incarnation 1")
    with pytest.raises(RendezvousError, match="worker/0 did not join the job in time"):
        broadcasts.wait_for_broadcast(SESSION, 0)
    schedule.members.attach(0, "incarnation 0")
    schedule.members.detach(0, "incarnation 0", why="its host has not answered.")
    with pytest.raises(
        PeerLostError, match=r"lost worker/0 .* the time set: its host has not answered\. See the end of"
    ):
        broadcasts.wait_for_broadcast(SESSION, 1)
    schedule.members.attach(0, "incarnation 0")
    with pytest.raises(CollectiveTimeoutError, match="worker/0 did not broadcast its managed session"):
        broadcasts.wait_for_broadcast(SESSION, 0)


def test_a_worker_does_not_begin_a_session_that_the_chief_has_left_out() -> None:
    client: Any = SimpleNamespace(request=lambda server, message: (FitOver(), []))
    worker = ParameterServerWorker(client, 1, 2, rules(), None, None, "")
    with pytest.raises(PeerLostError, match="lost the chief during the start of a managed session"):
        worker.synchronize_session_start()
