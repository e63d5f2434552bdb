"""Who gets which ticket, without processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from phalanx.cluster.admission_control import link_name
from phalanx.errors import CollectiveTimeoutError, EvictedError, PeerLostError, PhalanxError
from phalanx.parameter_server.server.chief_broadcasts import ChiefBroadcasts
from phalanx.parameter_server.server.epoch_validation import EpochValidation
from phalanx.parameter_server.server.merge_history import MergeHistory, MergeResult
from phalanx.parameter_server.server.schedule_rebuild import ScheduleRebuild
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.variable_store import VariableStore
from phalanx.parameter_server.server.worker_membership import WorkerMembership
from phalanx.parameter_server.server.worker_table import WorkerTable
from phalanx.parameter_server.server_messages import (
    Acknowledged,
    AppliedUpdate,
    DeclareModel,
    EpochOver,
    EpochReport,
    FitOver,
    GroupState,
    ModelDescription,
    Rejoin,
    RequestValidationLogs,
    Ticket,
    UpdateRules,
    ValidationLogs,
    Values,
)

BOUND_S = 20.0
NAMES = ("worker/0", "worker/1", "worker/2")


def rules(*, synchronous: bool = False, staleness: int = -1, timeout_s: float = BOUND_S) -> UpdateRules:
    return UpdateRules(
        synchronous=synchronous,
        replicas_to_aggregate=0,
        staleness=staleness,
        refuse_nan=True,
        timeout_s=timeout_s,
    )


def schedule_of(
    names: Sequence[str],
    *,
    start_timeout_s: float = BOUND_S,
    reconnect_s: float = 0.0,
    chief_reconnect_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> StepSchedule:
    """A schedule before its first `fit`, with no worker connected."""
    table = WorkerTable(tuple(names), reconnect_s=reconnect_s, chief_reconnect_s=chief_reconnect_s, clock=clock)
    return StepSchedule(WorkerMembership(tuple(names), start_timeout_s, table, clock))


def begun(steps: int | None, *, workers: int = 2, **options: object) -> StepSchedule:
    """A schedule whose first epoch is open, with workers 0, 1, ... present."""
    schedule = schedule_of(NAMES[:workers], start_timeout_s=BOUND_S)
    for worker in range(workers):
        schedule.members.attach(worker, f"incarnation {worker}")
    schedule.begin_fit(rules(**options), 0)  # type: ignore[arg-type]
    schedule.open_epoch(0, 0, steps, None)
    return schedule


def take(schedule: StepSchedule, worker: int, epoch: int = 0) -> Ticket:
    ticket = request_ticket(schedule, worker, epoch=epoch)
    assert isinstance(ticket, Ticket)
    return ticket


def request_ticket(
    schedule: StepSchedule, worker: int, *, epoch: int = 0, incarnation: str | None = None, within_s: float = BOUND_S
) -> Ticket | EpochOver | FitOver:
    """What a worker of the first `fit` hears when it asks for a ticket."""
    return schedule.next_ticket(worker, incarnation or f"incarnation {worker}", 0, epoch, 1, within_s)


def at_hand(schedule: StepSchedule, worker: int) -> Ticket | None:
    return schedule.try_next_ticket(worker, f"incarnation {worker}", 0, 0, 1)


def test_each_batch_is_given_to_one_worker() -> None:
    schedule = begun(5)
    batches = []
    for worker in (0, 1, 1, 1, 0):
        ticket = take(schedule, worker)
        batches.append(ticket.batch)
        schedule.complete_step(ticket)
    assert batches == [0, 1, 2, 3, 4]
    assert isinstance(request_ticket(schedule, 0, epoch=0), EpochOver)
    assert schedule.global_step == 5


def test_the_batch_of_a_lost_worker_goes_to_another() -> None:
    schedule = begun(2)
    lost, own = take(schedule, 1), take(schedule, 0)
    schedule.complete_step(own)
    assert at_hand(schedule, 0) is None, "all batches are given out"
    schedule.members.detach(1, "incarnation 1")
    assert take(schedule, 0).batch == lost.batch


def test_what_a_new_head_cannot_account_for_is_counted() -> None:
    schedule = begun(10)
    rebuild = ScheduleRebuild(schedule)
    rebuild.start()

    def rejoin(worker: int, *, batches: int, made: int, held: tuple[int, ...]) -> None:
        tickets = tuple(Ticket(0, 0, batch, (worker,), worker, 20 + batch, schedule.fit.era) for batch in held)
        known = Rejoin(0, schedule.fit.era, 0, 1, tickets, batches, 5, 5, 10, steps_taken=made)
        rebuild.rejoin(worker, known, None)

    rejoin(0, batches=6, made=3, held=(4,))
    rejoin(1, batches=4, made=1, held=())
    assert schedule.fit.lost.count == 1, "of six 3 + 1 were trained, and one is held"
    assert "1 batch of this fit()" in schedule.fit.lost.describe()
    assert take(schedule, 1).batch == 6
    schedule.begin_fit(rules(), 1)
    assert not schedule.fit.lost.describe()


def test_a_step_that_one_has_finished_is_not_counted_again_when_another_repeats_it() -> None:
    schedule = begun(10, synchronous=True)
    rebuild = ScheduleRebuild(schedule)
    rebuild.start()

    def ticket(worker: int, batch: int) -> Ticket:
        return Ticket(0, 0, batch, (0, 1), worker, batch, schedule.fit.era)

    # Both made step 4; worker 0 was answered, and has the ticket of step 5, and worker 1 was not.
    for worker, batch, finished, step in ((0, 5, 4, 5), (1, 4, 3, 4)):
        message = Rejoin(0, schedule.fit.era, 0, 1, (ticket(worker, batch),), batch + 1, finished, step, 10)
        rebuild.rejoin(worker, message, None)
    assert schedule.global_step == 5
    schedule.complete_step(ticket(1, 4))
    assert schedule.global_step == 5
    assert take(schedule, 1).serial == 5, "which worker 0 has"
    schedule.complete_step(ticket(0, 5))
    assert schedule.global_step == 6


def successor(former: StepSchedule, *positions: Rejoin) -> StepSchedule:
    """A head that has lost all since the epoch was opened, and hears of these positions of workers 0, 1, ..."""
    schedule = begun(None, workers=len(positions))
    schedule.begin_fit(former.fit.rules, 0, era=former.fit.era)
    rebuild = ScheduleRebuild(schedule)
    rebuild.start()
    for worker, position in enumerate(positions):
        rebuild.rejoin(worker, position, None)
    return schedule


def test_a_step_that_others_have_seen_is_not_counted_again_when_its_answer_was_lost() -> None:
    former = begun(10)
    lost, answered = take(former, 0), take(former, 1)
    former.complete_step(lost)
    former.complete_step(answered)
    step, counted = former.global_step, former.counted.serials()
    assert step == 2
    # The head was killed when worker 1 had its answer, and worker 0 did not.
    era = former.fit.era
    unaware = Rejoin(0, era, 0, 0, (lost,), 1, -1, 0, 10)
    aware = Rejoin(0, era, 0, 2, (), 2, answered.serial, step, 10, steps_taken=1, counted_serials=counted)
    schedule = successor(former, unaware, aware)
    again = msgspec.structs.replace(aware, counted_serials=schedule.counted.serials())
    for head in (schedule, successor(former, unaware, again)):  # the new one may be killed too
        assert head.global_step == 2
        head.complete_step(lost)
        assert head.global_step == 2
        head.complete_step(take(head, 0))
        assert head.global_step == 3


def test_a_step_whose_answer_was_lost_counts_when_no_answer_has_counted_it() -> None:
    former = begun(10)
    lost, answered = take(former, 0), take(former, 1)
    former.complete_step(answered)
    step, counted = former.global_step, former.counted.serials()
    unaware = Rejoin(0, former.fit.era, 0, 0, (lost,), 1, -1, 0, 10)
    aware = Rejoin(0, former.fit.era, 0, 2, (), 2, answered.serial, step, 10, steps_taken=1, counted_serials=counted)
    schedule = successor(former, unaware, aware)
    schedule.complete_step(lost)
    assert schedule.global_step == 2


def test_a_new_head_hands_out_no_batch_of_a_worker_that_is_about_to_begin_the_epoch() -> None:
    former = begun(10)
    former.open_epoch(0, 1, 10, None)
    held = take(former, 1, epoch=1)
    # Worker 1 asked for its first ticket before it began the epoch, and fetches the weights now.
    chief = Rejoin(0, former.fit.era, 1, 0, (), 0, -1, 0, 10)
    schedule = successor(former, chief, Rejoin(0, former.fit.era, 0, 0, (held,), 0, -1, 0, 10))
    ticket = take(schedule, 0, epoch=1)
    assert (ticket.batch, ticket.serial) == (held.batch + 1, held.serial + 1)
    assert schedule.fit.tickets.holders() == {0, 1}
    assert schedule.fit.reports.participants == {0, 1}


def test_a_ticket_that_comes_after_the_schedule_was_rebuilt_keeps_its_serial() -> None:
    """The next ticket of its worker would look like a repetition of it."""
    schedule = begun(10)
    late = Ticket(0, 0, 7, (1,), 1, 30, schedule.fit.era)
    ScheduleRebuild(schedule).rejoin(1, Rejoin(0, schedule.fit.era, 0, 1, (late,), 8, 29, 5, 10), None)
    assert take(schedule, 1).serial == 31


def test_a_new_head_issues_no_serial_of_a_step_that_is_applied() -> None:
    """A repeated push is known by its serial: the update of another step with this serial would be dropped."""
    schedule = schedule_of(NAMES[:2])
    store = VariableStore(0, schedule, is_head=True)
    completed = tuple((serial, 0, (1,), 0) for serial in (4, 5, 6))
    state = GroupState(declared_model(), 1, 1, (), completed, (), 0, False, 6)
    store.restore(state, [])
    store.apply_replicated(AppliedUpdate(7, 0, (1,), 0, (), 7), [])
    rebuild = ScheduleRebuild(schedule)
    for worker in (0, 1):
        schedule.members.attach(worker, f"incarnation {worker}")
    rebuild.start()
    # Worker 1, which made steps 4 to 7, is another process by now; the chief is still at step 3.
    held = Ticket(0, 0, 2, (0,), 0, 3, schedule.fit.era)
    rebuild.rejoin(0, Rejoin(0, schedule.fit.era, 0, 1, (held,), 3, 2, 2, 10, steps_taken=2), None)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(rebuild.wait, 1, BOUND_S)
        rebuild.wait(0, BOUND_S)
        waiting.result(BOUND_S)
    ticket = take(schedule, 1)
    assert store.history.result_for((ticket.serial, 0), 1) is None
    assert ticket.serial == 8


def declared_model() -> DeclareModel:
    """Of a model of which this server has nothing."""
    return DeclareModel(0, 0, ModelDescription((), (), "", (), ()), rules(), (), 0, 1)


def test_updates_outside_of_epochs_count() -> None:
    schedule = begun(None)
    for serial in (-7, -3):
        schedule.complete_step(Ticket(0, -1, -1, (1,), 1, serial, schedule.fit.era))
    assert schedule.global_step == 2


def test_an_epoch_is_over_when_the_last_batch_is_applied() -> None:
    schedule = begun(1)
    ticket = take(schedule, 1)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(request_ticket, schedule, 0)
        schedule.complete_step(ticket)
        assert isinstance(answer.result(BOUND_S), EpochOver)


def test_a_worker_that_is_gone_says_nothing_for_its_successor() -> None:
    schedule = begun(4)
    schedule.members.attach(1, "successor")
    with pytest.raises(PhalanxError, match="started again in another process"):
        request_ticket(schedule, 1)
    ticket = request_ticket(schedule, 1, incarnation="successor")
    assert isinstance(ticket, Ticket)
    schedule.members.detach(1, "incarnation 1")  # the old connection is noticed to be closed only now
    assert schedule.members.table.is_present(1)
    schedule.complete_step(ticket)
    assert take(schedule, 0).batch == ticket.batch + 1


def test_all_make_a_synchronous_step_together() -> None:
    schedule = begun(2, workers=3, synchronous=True)
    tickets = [take(schedule, worker) for worker in range(3)]
    assert {ticket.batch for ticket in tickets} == {0}
    assert {ticket.members for ticket in tickets} == {(0, 1, 2)}
    assert at_hand(schedule, 0) is None, "the step is not applied"
    schedule.complete_step(tickets[0])
    assert take(schedule, 0).batch == 1


def test_the_next_synchronous_step_is_made_by_those_who_are_left() -> None:
    schedule = begun(3, synchronous=True)
    first = take(schedule, 0)
    schedule.members.detach(1, "incarnation 1")
    schedule.complete_step(first)
    assert take(schedule, 0).members == (0,)


def test_nobody_runs_further_ahead_than_the_staleness() -> None:
    schedule = begun(None, staleness=1)
    for _ in range(2):
        schedule.complete_step(take(schedule, 0))
    assert at_hand(schedule, 0) is None
    schedule.complete_step(take(schedule, 1))
    assert take(schedule, 0).batch == 3


def test_one_who_holds_the_others_back_too_long_is_left_out() -> None:
    schedule = begun(None, staleness=0, timeout_s=0.2)
    schedule.complete_step(take(schedule, 0))
    assert isinstance(request_ticket(schedule, 0, epoch=0, within_s=0.2), Ticket)
    assert not schedule.members.table.is_present(1)
    assert schedule.members.table.is_evicted("incarnation 1")


def test_data_that_end_end_the_epoch() -> None:
    schedule = begun(None)
    first, second = take(schedule, 0), take(schedule, 1)
    schedule.complete_step(first)
    schedule.report_no_batch(second, is_end_of_data=True)
    assert isinstance(request_ticket(schedule, 0, epoch=0), EpochOver)


def test_the_chief_ends_an_epoch_and_what_was_begun_is_made() -> None:
    schedule = begun(None)
    first, second, third = take(schedule, 0), take(schedule, 1), take(schedule, 0)
    schedule.complete_step(first)
    assert schedule.end_epoch(0, 0) == schedule.end_epoch(0, 0) == 3
    assert at_hand(schedule, 0) is None
    schedule.report_no_batch(third, is_end_of_data=True)  # the chief's own next one
    schedule.complete_step(second)
    answers = [request_ticket(schedule, worker, epoch=0) for worker in (0, 1)]
    assert answers == [EpochOver(2), EpochOver(2)]
    assert schedule.end_epoch(0, 1) == 2, "not the epoch that is open"


def test_whose_part_was_not_needed_waits_for_the_last_step_on_the_other_servers() -> None:
    schedule = begun(1, synchronous=True)
    done = take(schedule, 1)
    schedule.complete_step(done)  # without the chief's part
    over = request_ticket(schedule, 0)
    assert over == EpochOver(1, newest_serial=done.serial)
    declared: Any = SimpleNamespace(rules=rules(synchronous=True), fit=0)
    other = begun(None, synchronous=True)
    store = VariableStore(1, other, is_head=False)
    store._shards = SimpleNamespace(declared=declared, values=lambda copy: [])
    with ThreadPoolExecutor() as pool:
        pulled = pool.submit(store.pull, 0, -1, over.newest_serial)
        assert not wait([pulled], timeout=0.2).done
        with store.changed:
            store.history.record((done.serial, 0), MergeResult((1,), []))
            store.changed.notify_all()
        assert pulled.result(BOUND_S) == (0, [])
        lost = pool.submit(store.pull, 0, -1, over.newest_serial + 1)
        other.members.detach(1, "incarnation 1")
        store.wake()
        assert lost.result(BOUND_S) == (0, []), "who could send it is gone"


def test_who_waits_for_a_chief_that_left_is_told() -> None:
    schedule = begun(1)
    schedule.members.record_leave(0)
    with pytest.raises(PeerLostError, match="lost worker/0 during fit: its connection closed"):
        request_ticket(schedule, 1, epoch=1)


def test_waiting_for_the_chief_is_bounded() -> None:
    schedule = begun(1)
    with pytest.raises(CollectiveTimeoutError, match="worker/0 did not begin epoch 2"):
        request_ticket(schedule, 1, epoch=1, within_s=0.1)
    schedule.members.detach(0, "incarnation 0")
    with pytest.raises(PeerLostError, match="lost worker/0"):
        request_ticket(schedule, 1, epoch=1, within_s=0.1)


def test_a_former_fit_or_epoch_is_over() -> None:
    schedule = begun(3)
    schedule.open_epoch(0, 4, 3, None)
    assert isinstance(request_ticket(schedule, 1, epoch=2), EpochOver)
    schedule.end_fit(0)
    assert isinstance(request_ticket(schedule, 1, epoch=4), FitOver)


def test_reports_are_merged_by_how_they_count() -> None:
    schedule = begun(1)
    weights = ("one", "share", "first")
    for worker, samples in ((0, 1), (1, 3)):
        report = EpochReport(0, 0, samples, 1, ("float32",) * 3, weights)
        schedule.add_report(worker, report, [np.full(1, worker + 1, np.float32)] * 3)
    merged = schedule.collect_reports(BOUND_S)
    assert schedule.fit.reports.merged()[1] == 4
    assert [float(array[0]) for array in merged] == [3.0, 1.75, 1.0]


def test_metrics_that_a_lost_worker_has_not_reported_are_noted() -> None:
    schedule = begun(3)
    for worker in (0, 1, 1):
        schedule.complete_step(take(schedule, worker))
    schedule.members.detach(1, "incarnation 1")
    schedule.add_report(0, EpochReport(0, 0, 1, 1, ("float32",), ("one",)), [np.ones(1, np.float32)])
    assert schedule.fit.reports.describe_lost() == "the metrics of 2 of 3 batches are lost with their worker"
    schedule.add_report(1, EpochReport(0, 0, 2, 2, ("float32",), ("one",)), [np.ones(1, np.float32)])
    assert schedule.fit.reports.describe_lost() == ""


def test_many_workers_take_every_batch_once() -> None:
    schedule = schedule_of(tuple(f"worker/{i}" for i in range(8)), start_timeout_s=BOUND_S)
    for worker in range(8):
        schedule.members.attach(worker, f"incarnation {worker}")
    schedule.begin_fit(rules(), 0)
    schedule.open_epoch(0, 0, 400, None)
    taken: list[int] = []
    lock = threading.Lock()

    def work(worker: int) -> None:
        while isinstance(ticket := request_ticket(schedule, worker), Ticket):
            with lock:
                taken.append(ticket.batch)
            schedule.complete_step(ticket)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert sorted(taken) == list(range(400))


def test_workers_apart_by_their_steps_still_end_an_epoch() -> None:
    schedule = begun(3, staleness=0)
    for worker in (0, 1, 0):
        schedule.complete_step(take(schedule, worker))
    assert isinstance(request_ticket(schedule, 0), EpochOver), "it is ahead, but there is nothing to wait for"
    assert isinstance(request_ticket(schedule, 1), EpochOver)
    assert schedule.members.table.is_present(1)


def test_tickets_in_hand_count_as_steps_ahead() -> None:
    schedule = begun(None, staleness=1)
    take(schedule, 0), take(schedule, 0)
    assert at_hand(schedule, 0) is None


def test_one_that_keeps_the_last_batch_too_long_is_left_out() -> None:
    schedule = begun(1)
    kept = take(schedule, 1)
    again = request_ticket(schedule, 0, within_s=0.2)
    assert isinstance(again, Ticket)
    assert again.batch == kept.batch
    assert schedule.members.table.is_evicted("incarnation 1")


def test_a_chief_that_begins_again_takes_the_others_back() -> None:
    schedule = begun(3)
    schedule.open_epoch(0, 4, 3, None)
    schedule.members.attach(0, "second chief")
    schedule.begin_fit(rules(), 0)
    schedule.open_epoch(0, 2, 3, None)
    answer = request_ticket(schedule, 1, epoch=5)
    assert isinstance(answer, EpochOver)
    assert (answer.resume_epoch, answer.era) == (2, 2)
    assert isinstance(schedule.next_ticket(1, "incarnation 1", 0, 2, 2, BOUND_S), Ticket)


def test_a_second_fit_needs_only_those_who_are_left() -> None:
    schedule = begun(1, synchronous=True)
    schedule.members.detach(1, "incarnation 1")
    schedule.end_fit(0)
    schedule.begin_fit(rules(synchronous=True), 1)
    schedule.open_epoch(1, 0, 1, None)
    assert isinstance(schedule.next_ticket(0, "incarnation 0", 1, 0, 2, BOUND_S), Ticket)


def test_the_report_of_one_that_took_no_part_is_not_waited_for() -> None:
    schedule = begun(1)
    schedule.complete_step(take(schedule, 0))
    schedule.members.attach(1, "just started")
    schedule.add_report(0, EpochReport(0, 0, 1, 1, ("float32",), ("one",)), [np.ones(1, np.float32)])
    merged, steps = schedule.collect_reports(BOUND_S), schedule.fit.steps_issued
    assert (float(merged[0][0]), steps) == (1.0, 1)
    assert schedule.members.table.is_present(1)


WAIT_S = 0.5


def test_a_chief_that_gives_signs_of_life_is_waited_for() -> None:
    schedule = begun(0)
    with ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(schedule.wait_for_order, 0, 1, 1, WAIT_S),
            pool.submit(request_ticket, schedule, 1, epoch=1, within_s=WAIT_S),
        ]
        until = time.monotonic() + 3 * WAIT_S
        while time.monotonic() < until:
            schedule.members.record_chief_heartbeat()
            time.sleep(WAIT_S / 20)
        schedule.open_epoch(0, 1, 1, np.arange(3))
        order, ticket = (each.result(BOUND_S) for each in waiting)
    np.testing.assert_array_equal(order, np.arange(3))
    assert isinstance(ticket, Ticket)


def test_one_that_gives_none_is_not() -> None:
    with pytest.raises(CollectiveTimeoutError, match="did not begin epoch 2"):
        begun(0).wait_for_order(0, 1, 1, WAIT_S)


def test_who_asks_for_an_order_hears_of_the_end_and_of_a_new_beginning() -> None:
    schedule = begun(2)
    schedule.begin_fit(rules(), 0)
    schedule.open_epoch(0, 0, 2, np.arange(5))
    answer = schedule.wait_for_order(0, 1, 1, BOUND_S)
    assert isinstance(answer, EpochOver)
    assert (answer.resume_epoch, answer.era) == (0, 2)
    schedule.end_fit(0)
    assert isinstance(schedule.wait_for_order(0, 1, 2, BOUND_S), FitOver)


def test_workers_wait_for_the_validation_of_their_epoch() -> None:
    schedule = begun(2)
    validation = EpochValidation(schedule)
    era = schedule.fit.era
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(validation.wait, RequestValidationLogs(0, 0, era), BOUND_S)
        assert not wait([waiting], 0.1).done
        validation.store(ValidationLogs(0, 0, era), [memoryview(b"logs")])
        answer, arrays = waiting.result(BOUND_S)
    assert isinstance(answer, Values)
    assert bytes(arrays[0]) == b"logs"
    schedule.open_epoch(0, 1, 2, None)
    schedule.open_epoch(0, 2, 2, None)
    late = validation.wait(RequestValidationLogs(0, 1, era), BOUND_S)
    assert late == (Acknowledged(), ()), "the chief has not validated after this epoch"
    schedule.begin_fit(rules(), 0)
    schedule.open_epoch(0, 0, 2, None)
    answer, _ = validation.wait(RequestValidationLogs(0, 2, era), BOUND_S)
    assert isinstance(answer, EpochOver)
    assert answer.resume_epoch == 0
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(validation.wait, RequestValidationLogs(0, 0, era + 1), BOUND_S)
        assert not wait([waiting], 0.1).done, "what is there is of the chief before its restart"
        schedule.end_fit(0)
        assert isinstance(waiting.result(BOUND_S)[0], FitOver)


def test_a_chief_that_does_not_validate_in_time_is_named() -> None:
    now = [100.0]
    schedule = schedule_of(NAMES[:2], clock=lambda: now[0])
    for worker in range(2):
        schedule.members.attach(worker, f"incarnation {worker}")
    schedule.begin_fit(rules(), 0)
    schedule.open_epoch(0, 0, 2, None)
    now[0] += 9.0
    schedule.members.record_chief_heartbeat()
    now[0] += 9.0
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(EpochValidation(schedule).wait, RequestValidationLogs(0, 0, schedule.fit.era), 10.0)
        assert not wait([waiting], 0.1).done
        now[0] += 11.0
        with pytest.raises(CollectiveTimeoutError, match="worker/0 did not validate after epoch 1"):
            waiting.result(BOUND_S)


def test_what_the_chief_tells_once_holds_and_what_it_tells_again_replaces() -> None:
    schedule = begun(1)
    broadcasts = ChiefBroadcasts(schedule.members)
    first, second = [np.zeros(1, np.uint8)], [np.ones(1, np.uint8)]
    assert broadcasts.broadcast("state", -1, first, keep_first=True) is first
    assert broadcasts.broadcast("state", -1, second, keep_first=True) is first
    assert broadcasts.wait_for_broadcast("state", -1) is first
    broadcasts.broadcast("weights", 1, second, keep_first=False)
    assert broadcasts.wait_for_broadcast("weights", 0) is second
    schedule.members.record_leave(0)
    assert broadcasts.wait_for_broadcast("weights", 2) is None


def test_a_chief_that_was_started_again_counts_from_what_it_has_restored() -> None:
    schedule = schedule_of(["chief", "worker"], start_timeout_s=BOUND_S)
    schedule.members.attach(0, "first life")
    schedule.begin_fit(rules(), 0, 0)
    schedule.global_step = 70
    schedule.begin_fit(rules(), 1, 60)  # another fit: the others have made more steps than the chief knows of
    assert schedule.global_step == 70
    schedule.members.attach(0, "second life")
    schedule.begin_fit(rules(), 0, 34)
    assert schedule.global_step == 34


def test_a_worker_that_reconnects_is_expected_for_a_while() -> None:
    now = [100.0]
    schedule = schedule_of(("worker/0", "worker/1"), start_timeout_s=60.0, reconnect_s=6.0, clock=lambda: now[0])
    schedule.members.attach(1, "first")
    schedule.members.detach(1, "first")
    assert schedule.members.table.is_present(1)
    now[0] += 7.0
    assert not schedule.members.table.is_present(1)
    schedule.members.attach(1, "second")
    schedule.members.record_leave(1)
    schedule.members.detach(1, "second")
    assert not schedule.members.table.is_present(1)


def test_a_worker_on_its_way_that_does_not_come_is_waited_for_no_longer() -> None:
    schedule = schedule_of(("worker/0", "worker/1"), start_timeout_s=60.0)
    schedule.members.attach(0, "first")
    schedule.begin_fit(rules(synchronous=True), 0)
    ScheduleRebuild(schedule).expect_workers()
    assert schedule.members.table.is_present(1)
    schedule.members.evict(1)
    assert not schedule.members.table.is_present(1)
    schedule.members.attach(1, "second")
    assert schedule.members.table.is_present(1)
    assert not schedule.members.table.is_evicted("second")


# A process and its links.


def test_who_waits_at_a_link_that_was_replaced_gets_no_ticket() -> None:
    schedule = begun(2, synchronous=True)
    schedule.members.attach(1, link_name("incarnation 1", 0))
    schedule.members.attach(1, link_name("incarnation 1", 1))
    with pytest.raises(EvictedError):
        request_ticket(schedule, 1, incarnation=link_name("incarnation 1", 0))
    assert isinstance(request_ticket(schedule, 1, incarnation=link_name("incarnation 1", 1)), Ticket)


def test_a_process_that_was_left_out_is_so_by_any_link() -> None:
    schedule = begun(2)
    schedule.members.attach(1, link_name("incarnation", 0))
    schedule.members.evict(1)
    assert schedule.members.table.is_evicted(link_name("incarnation", 1))
    assert not schedule.members.table.is_evicted(link_name("another", 2))


def test_a_process_that_was_left_out_and_links_again_is_not_waited_for() -> None:
    schedule = begun(4, synchronous=True, staleness=1)
    table = schedule.members.table
    schedule.members.attach(1, link_name("incarnation", 0))
    schedule.members.evict(1)
    schedule.members.attach(1, link_name("incarnation", 1))
    assert not table.is_present(1)
    assert take(schedule, 0).members == (0,)
    assert schedule.fit.staleness.blocked_by(0, 5) == 0, "no other is behind it"
    schedule.members.detach(1, link_name("incarnation", 1))
    assert not table.is_present(1)
    schedule.members.attach(1, link_name("another", 2))
    assert table.is_present(1)


def test_a_chief_that_only_reconnected_is_no_other_chief() -> None:
    schedule = schedule_of(("chief", "worker"), start_timeout_s=BOUND_S)
    schedule.members.attach(0, link_name("life", 0))
    schedule.begin_fit(rules(), 0, 0)
    schedule.global_step = 70
    schedule.members.attach(0, link_name("life", 1))
    schedule.begin_fit(rules(), 1, 60)
    assert schedule.global_step == 70


def test_a_stop_that_was_asked_for_is_of_that_fit_alone() -> None:
    schedule = begun(3)
    schedule.fit.stop_requested = True
    schedule.members.attach(0, "second chief")
    schedule.begin_fit(rules(), 0)
    assert not schedule.fit.stop_requested


def test_the_chief_may_be_away_for_longer() -> None:
    now = [100.0]
    schedule = schedule_of(
        NAMES[:2], start_timeout_s=60.0, reconnect_s=6.0, chief_reconnect_s=60.0, clock=lambda: now[0]
    )
    for worker in (0, 1):
        schedule.members.attach(worker, "life")
        schedule.members.detach(worker, "life")
    now[0] += 50.0
    assert (schedule.members.table.is_present(0), schedule.members.table.is_present(1)) == (True, False)


def test_a_new_leader_does_without_a_worker_that_does_not_come_before_the_time_is_up() -> None:
    schedule = begun(5)
    rebuild = ScheduleRebuild(schedule)
    rebuild.start()
    rebuild.rejoin(0, Rejoin(0, 1, 0, 2, (), 2, 2, 2, 5), None)
    rebuild.wait(0, 0.4)


def test_a_history_of_updates_outside_of_epochs_has_no_step_to_wait_for() -> None:
    history = MergeHistory.from_state([(-7, 0, (1,), 0), (-12345, 0, (0,), 0)], [])
    assert history.newest_serial() == -1
    assert MergeHistory.from_state([(5, 0, (0,), 0)], []).is_completed((4, 1))
