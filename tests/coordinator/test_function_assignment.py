"""Decisions of the queue, without a process."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.coordinator.function_assignment import MAX_FUNCTIONS_PER_WORKER, MAX_LOST_WORKERS, FunctionAssignment


def queue_of(functions: Iterable[int], workers: Iterable[int] = (0,)) -> FunctionAssignment:
    queue = FunctionAssignment()
    for worker in workers:
        queue.add_worker(worker, f"{worker}")
    for function in functions:
        queue.add(function)
    return queue


def test_functions_are_sent_in_order_and_a_worker_has_no_more_than_two() -> None:
    queue = queue_of(range(4))
    assert [queue.assign_next(0, "0") for _ in range(MAX_FUNCTIONS_PER_WORKER + 1)] == [0, 1, None]
    assert queue.finish(0, "0", 0)
    assert queue.assign_next(0, "0") == 2
    assert (queue.unfinished, queue.running) == (3, 2)


def test_a_worker_keeps_nothing_in_store_that_an_idle_one_could_run() -> None:
    queue = queue_of(range(2), workers=(0, 1))
    assert queue.assign_next(0, "0") == 0
    assert queue.assign_next(0, "0") is None
    assert queue.assign_next(1, "1") == 1
    queue.add(2)
    assert queue.assign_next(0, "0") == 2


def test_what_a_lost_worker_had_runs_elsewhere_and_first() -> None:
    queue = queue_of(range(4), workers=(0,))
    queue.assign_next(0, "0")
    queue.assign_next(0, "0")
    queue.add_worker(1, "1")
    assert queue.assign_next(1, "1") == 2
    assert queue.remove_worker(0, "0") == []
    assert queue.assign_next(1, "1") == 0
    assert queue.finish(1, "1", 2)
    assert queue.assign_next(1, "1") == 1


def test_answers_of_a_former_incarnation_do_not_count() -> None:
    queue = queue_of(range(1))
    queue.assign_next(0, "0")
    queue.add_worker(0, "again")
    assert not queue.finish(0, "0", 0)
    assert queue.assign_next(0, "0") is None
    assert queue.remove_worker(0, "0") == []
    assert queue.assign_next(0, "again") == 0
    assert queue.finish(0, "again", 0)
    assert not queue.finish(0, "again", 0)
    assert queue.unfinished == 0


def test_a_function_waits_for_the_results_that_it_needs() -> None:
    queue = queue_of([0], workers=(0, 1))
    queue.add(1, needs=[0])
    queue.add(2)
    assert queue.assign_next(0, "0") == 0
    assert queue.assign_next(1, "1") == 2
    assert queue.assign_next(1, "1") is None
    queue.finish(0, "0", 0)
    assert queue.assign_next(0, "0") == 1


def test_after_a_failure_the_waiting_are_cancelled_and_the_running_waited_for() -> None:
    queue = queue_of(range(5), workers=(0, 1))
    queue.assign_next(0, "0")
    queue.assign_next(1, "1")
    assert queue.finish(0, "0", 0)
    assert queue.fail() == [2, 3, 4]
    assert queue.is_failing
    assert queue.unfinished == queue.running == 1
    assert queue.assign_next(0, "0") is None
    assert queue.remove_worker(1, "1") == [1], "it does not run again"
    queue.clear_failure()
    queue.add(5)
    assert queue.assign_next(0, "0") == 5


def test_a_function_that_costs_too_many_workers_is_given_up() -> None:
    queue = queue_of([0, 1], workers=())
    for life in range(MAX_LOST_WORKERS):
        queue.add_worker(0, str(life))
        assert [queue.assign_next(0, str(life)) for _ in range(2)] == [0, 1]
        lost = queue.remove_worker(0, str(life))
    assert lost == [0], "the one that waited behind it is innocent"
    queue.add_worker(0, "last")
    assert queue.assign_next(0, "last") == 1


@given(st.data())
def test_every_function_is_counted_once_whatever_dies(data: st.DataObject) -> None:
    queue = FunctionAssignment()
    functions, workers = data.draw(st.integers(1, 12)), 3
    for function in range(functions):
        queue.add(function, needs=[f for f in range(function) if data.draw(st.integers(0, 5)) == 0])
    lives = dict.fromkeys(range(workers), 0)
    sent: dict[tuple[int, str], list[int]] = {}
    done: list[int] = []
    deaths = 0
    for worker in range(workers):
        queue.add_worker(worker, "0")
    while queue.unfinished:
        worker = data.draw(st.integers(0, workers - 1))
        key = worker, str(lives[worker])
        if deaths < MAX_LOST_WORKERS - 1 and data.draw(st.integers(0, 3)) == 0:
            deaths += 1
            assert queue.remove_worker(*key) == []
            lives[worker] += 1
            assert queue.add_worker(worker, str(lives[worker])) == []
            assert not any(queue.finish(*key, function) for function in sent.get(key, []))
            continue
        if (function := queue.assign_next(*key)) is not None:
            sent.setdefault(key, []).append(function)
        elif sent.get(key):
            function = sent[key].pop(0)
            assert queue.finish(*key, function)
            done.append(function)
    assert sorted(done) == list(range(functions))


@pytest.mark.parametrize("worker", [0, 7])
def test_who_is_not_here_gets_nothing(worker: int) -> None:
    queue = queue_of([0], workers=())
    assert queue.assign_next(worker, "0") is None
    assert queue.remove_worker(worker, "0") == []
    assert queue.workers == frozenset()
