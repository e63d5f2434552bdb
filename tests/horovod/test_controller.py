"""Ranks that do not come, die or leave: what the others see. Real processes, real failures."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from phalanx.cluster.membership import Membership
from phalanx.collectives import CommunicationOptions, connect
from phalanx.errors import CollectiveTimeoutError, PeerLostError
from phalanx.horovod import controller as controller_module
from phalanx.horovod.common.exceptions import HorovodInternalError
from phalanx.horovod.controller import Controller
from phalanx.horovod.execution import OperationBuffers
from phalanx.horovod.horovod_environment import HorovodEnvironment
from phalanx.horovod.operation_request import Request
from tests.support.processes import run_ranks, values


class Rank:
    """One rank's controller, and what it warned of."""

    def __init__(self, membership: Membership, knobs: HorovodEnvironment, timeout_s: float):
        communicator = self.communicator = connect(membership, CommunicationOptions(timeout_seconds=timeout_s))
        self.number = membership.rank
        self.controller = Controller(communicator, knobs, timeout_s, [one.task for one in membership.members])
        self.warned = threading.Event()
        self.warnings: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: (self.warnings.append(record.getMessage()), self.warned.set())  # type: ignore
        logging.getLogger("phalanx.horovod.negotiator").addHandler(handler)

    def start(self, name: str, *, wake: bool = True) -> Any:
        request = Request(name, "allreduce", ("float64",), ((2,),), "Sum")
        return self.controller.submit(request, OperationBuffers([np.ones(2)]), wake=wake)

    def merge(self, name: str) -> Any:
        handle = self.start(name, wake=False)
        self.controller.wait(handle)
        return handle.buffers.result[0].tolist()


def run(body: Callable[[Rank], Any], size: int = 2, *, timeout_s: float = 20.0, **knobs: Any) -> list[Any]:
    """What `body` returns or raises on each rank."""

    def rank(membership: Membership) -> Any:
        one = Rank(membership, HorovodEnvironment(**knobs), timeout_s)
        try:
            return body(one)
        finally:
            one.controller.close()

    return run_ranks(rank, size)


def test_a_rank_that_does_not_come_is_named_once_and_then_it_goes_on() -> None:
    read, write = os.pipe()  # from rank 0, as soon as it has warned

    def body(rank: Rank) -> Any:
        rank.merge("first")
        if rank.number == 1:
            os.read(read, 1)
        else:
            threading.Thread(target=lambda: rank.warned.wait(20) and os.write(write, b"!"), daemon=True).start()
        result = rank.merge("late")
        return result, rank.warnings

    (result, warnings), (_, silent) = values(run(body, stall_warning_s=1.0))
    os.close(read)
    os.close(write)
    assert result == [2.0, 2.0]
    assert not [text for text in silent if "late" in text]
    (warning,) = [text for text in warnings if "late" in text]
    assert "late waits for rank 1 (worker/1), which have not requested it" in warning


def test_the_error_after_the_second_limit_names_the_operation_and_the_rank() -> None:
    read, write = os.pipe()  # from rank 0, as soon as it has given up

    def body(rank: Rank) -> Any:
        rank.merge("first")
        if rank.number == 1:
            os.read(read, 1)
        else:
            rank.communicator.runner._timeout_s = 0.5
        try:
            rank.merge("late")
        except HorovodInternalError as error:
            return str(error), error.exit_code
        finally:
            os.write(write, b"!")
        return None

    (words, code), _ = values(run(body))
    os.close(read)
    os.close(write)
    assert words.startswith("late did not begin: worker/0 (rank 0) waited")
    assert "for worker/1 (rank 1," in words
    assert code == CollectiveTimeoutError.exit_code


def test_ranks_that_ask_for_different_things_are_named_and_the_job_ends_after_the_second_limit() -> None:
    def body(rank: Rank) -> Any:
        try:
            rank.merge("left" if rank.number == 0 else "right")
        except HorovodInternalError as error:
            return str(error), error.exit_code, type(error.__cause__).__name__, rank.warnings
        return None

    outcomes = values(run(body, stall_warning_s=0.2, timeout_s=3.0))
    texts = [outcome[0] for outcome in outcomes]
    assert len(set(texts)) == 1, "all ranks draw the same conclusion in the same round"
    assert "has waited" in texts[0]
    assert "Do all ranks request the same operations?" in texts[0]
    assert {outcome[1] for outcome in outcomes} == {CollectiveTimeoutError.exit_code}
    warned = [warning for outcome in outcomes for warning in outcome[3]]
    assert any("left waits for rank 1 (worker/1), which request other operations" in one for one in warned)
    assert any("right waits for rank 0 (worker/0)" in one for one in warned)


def test_a_rank_that_waits_itself_warns_where_the_first_one_has_joined() -> None:
    def body(rank: Rank) -> Any:
        with pytest.raises(HorovodInternalError, match="has waited"):
            rank.controller.join() if rank.number == 0 else rank.merge("left" if rank.number == 1 else "right")
        return rank.warnings

    joined, left, right = values(run(body, 3, stall_warning_s=0.2, timeout_s=3.0))
    assert not joined
    assert any("left waits for rank 2 (worker/2), which request other operations" in one for one in left)
    assert any("right waits for rank 1 (worker/1)" in one for one in right)


def test_an_operation_that_was_requested_before_the_last_rank_joins_is_not_lost() -> None:
    def body(rank: Rank) -> Any:
        # Both ranks join in the first round, and rank 0 requests the operation in the same one.
        handle = rank.start("before", wake=False) if rank.number == 0 else None
        rank.controller.join()
        if handle is None:
            return None
        rank.controller.wait(handle)
        return handle.buffers.result[0].tolist()

    assert values(run(body, timeout_s=5.0)) == [[1.0, 1.0], None]


def test_a_killed_rank_ends_all_that_wait_and_all_that_come_later() -> None:
    def body(rank: Rank) -> Any:
        rank.merge("first")
        if rank.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        errors = []
        for handle in [rank.start("waits"), None, None]:
            with pytest.raises(HorovodInternalError) as caught:
                rank.controller.wait(handle or rank.start("is refused or waits"))
            errors.append((caught.value.exit_code, type(caught.value.__cause__).__name__))
            caught.value.__cause__ = None  # as Keras's fit does, which raises it again `from None`
        with pytest.raises(HorovodInternalError, match="worker/1"):
            rank.merge("later")
        assert isinstance(rank.controller.failure, PeerLostError)
        return errors

    outcomes = run(body, 2)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].error is None, outcomes[0].text
    assert outcomes[0].value == [(PeerLostError.exit_code, "PeerLostError")] * 3


def test_closing_ends_what_waits() -> None:
    read, write = os.pipe()  # from rank 0, as soon as it has closed

    def body(rank: Rank) -> Any:
        rank.merge("first")
        if rank.number == 1:
            os.read(read, 1)
            return None  # leaves: rank 0 was in the middle of a round, or had not begun it
        handle = rank.start("alone")
        rank.controller.close()
        rank.controller.close()
        os.write(write, b"!")
        with pytest.raises(HorovodInternalError, match="shut down"):
            rank.controller.wait(handle)
        with pytest.raises(HorovodInternalError, match="shut down"):
            rank.start("after")
        return "ended"

    assert values(run(body))[0] == "ended"


def test_a_rank_that_closes_brings_its_values_to_what_was_agreed_on() -> None:
    def body(rank: Rank) -> Any:
        controller, brought = rank.controller, []
        negotiate, execute = controller._negotiator.negotiate, controller_module.execute

        def negotiate_and_close(*args: Any, **kwargs: Any) -> Any:
            found = negotiate(*args, **kwargs)
            threading.Thread(target=controller.close).start()
            with controller._changed:
                assert controller._changed.wait_for(lambda: controller.failure is not None, 20)
            return found

        controller._negotiator.negotiate = negotiate_and_close  # type: ignore[method-assign]
        controller_module.execute = lambda communicator, batch, parts: (  # type: ignore[attr-defined]
            brought.extend(parts),
            execute(communicator, batch, parts),
        )
        with pytest.raises(HorovodInternalError, match="shut down"):
            rank.merge("last")
        return [None if part is None else part.arrays[0].tolist() for part in brought]

    assert values(run(body, 1)) == [[[1.0, 1.0]]], "and no zeros, which only a rank that has joined brings"


def test_without_a_cache_and_with_a_tiny_one_results_are_the_same() -> None:
    def body(rank: Rank) -> Any:
        found = []
        for _ in range(3):
            order = range(6) if rank.number else reversed(range(6))
            handles = {i: rank.start(f"t{i}", wake=False) for i in order}
            for handle in handles.values():
                rank.controller.wait(handle)
            found.append([handles[i].buffers.result[0][0] for i in range(6)])
        return found

    for capacity in (0, 2):
        assert values(run(body, 3, cache_capacity=capacity, stall_warning_s=math.inf)) == [[[3.0] * 6] * 3] * 3


def test_threads_of_a_program_may_ask_at_the_same_time() -> None:
    def body(rank: Rank) -> Any:
        found: dict[str, Any] = {}

        def ask(name: str) -> None:
            for _ in range(20):
                found[name] = rank.merge(name)

        threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert values(run(body)) == [{name: [2.0, 2.0] for name in "abcd"}] * 2
