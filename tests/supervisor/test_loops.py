"""Threads that repeat something until a stop."""

from __future__ import annotations

import logging
import threading

import pytest

from phalanx.supervisor.boundary_requests import BoundaryRequests
from phalanx.supervisor.looper_threads import LooperThreads

BOUND_S = 20.0


def test_a_loop_calls_again_and_again_until_a_stop() -> None:
    loops, calls, thrice = LooperThreads(), [], threading.Event()

    def target(first: int, *, second: int) -> None:
        calls.append((first, second))
        if len(calls) == 3:
            thrice.set()

    thread = loops.start(0.001, target, (1,), {"second": 2})
    assert thrice.wait(BOUND_S)
    loops.request_stop()
    loops.join(BOUND_S)
    assert not thread.is_alive()
    assert set(calls) == {(1, 2)}


def test_without_an_interval_it_does_not_pause() -> None:
    loops, calls = LooperThreads(), []

    def target() -> None:
        calls.append(1)
        if len(calls) == 100:
            loops.request_stop()

    loops.start(None, target)
    assert loops.wait_for_stop(BOUND_S)
    loops.join(BOUND_S)
    assert len(calls) == 100


def test_an_error_asks_for_a_stop_and_the_first_one_counts(caplog: pytest.LogCaptureFixture) -> None:
    loops = LooperThreads()

    def fail() -> None:
        raise ValueError("first")

    loops.start(10, fail)
    assert loops.wait_for_stop(BOUND_S)
    loops.join(BOUND_S)
    with caplog.at_level(logging.ERROR):
        loops.request_stop(ValueError("second"))
    assert str(loops.error) == "first"
    assert "A further error" in caplog.text
    loops.clear()
    assert not loops.should_stop()
    assert loops.error is None


def test_a_thread_that_does_not_end_is_named() -> None:
    loops, go_on = LooperThreads(), threading.Event()
    thread = loops.start(None, go_on.wait, (BOUND_S,))
    loops.request_stop()
    with pytest.raises(RuntimeError, match=r"phalanx-loop-wait did not stop within 0\.05 s"):
        loops.join(0.05)
    go_on.set()
    thread.join(BOUND_S)


def test_what_a_thread_waits_for_is_done_while_it_is_waited_for() -> None:
    loops, served = LooperThreads(), threading.Event()
    loops.start(None, served.wait, (BOUND_S,))
    loops.request_stop()
    loops.join(BOUND_S, served.set)


def test_a_thread_that_ended_too_late_does_not_continue_in_the_next_session(caplog: pytest.LogCaptureFixture) -> None:
    loops, go_on, calls = LooperThreads(), threading.Event(), []

    def target() -> None:
        calls.append(1)
        go_on.wait(BOUND_S)
        raise ValueError("of the former session")

    thread = loops.start(None, target)
    loops.request_stop()
    with pytest.raises(RuntimeError):
        loops.join(0.0)
    loops.clear()
    go_on.set()
    thread.join(BOUND_S)
    assert not thread.is_alive()
    assert calls == [1]
    assert not loops.should_stop(), "the next session has no error"
    assert "former session" in caplog.text


def test_what_was_started_before_the_session_belongs_to_it() -> None:
    loops, go_on = LooperThreads(), threading.Event()
    thread = loops.start(None, go_on.wait, (BOUND_S,))
    loops.clear()
    loops.request_stop()
    loops.join(BOUND_S, go_on.set)
    assert not thread.is_alive()


def test_an_interrupt_while_a_request_is_served_ends_its_wait() -> None:
    """Else the thread that asked for it would wait without end, and Ctrl-C for that thread."""
    requests, raised = BoundaryRequests(), []

    def interrupt() -> None:
        raise KeyboardInterrupt

    def ask() -> None:
        try:
            requests.call(interrupt, BOUND_S)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while not requests._waiting:
        thread.join(0.01)
    with pytest.raises(KeyboardInterrupt):
        requests.serve()
    requests.close()
    thread.join(5.0)
    assert raised == ["The managed session was interrupted meanwhile."]
