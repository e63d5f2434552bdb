"""What a worker sends and awaits in its steps, without any server."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phalanx.errors import EvictedError
from phalanx.parameter_server.client.parameter_client import HEAD
from phalanx.parameter_server.client.placed_variables import PlacedVariables
from phalanx.parameter_server.server_messages import QueryJobOver, Response, Ticket, Values
from phalanx.parameter_server.shard_placement import PlacedVariable, Shard
from phalanx.training.steps.parameter_server_step import ParameterServerMerge

TICKETS = [Ticket(0, 0, batch, (0,), 0, serial=batch + 1, era=0) for batch in range(9)]
FIRST, SECOND, *_ = TICKETS


class Servers:
    """Two of them: the head has answered, and the other one is lost before it has."""

    num_servers = 2
    timeout_s = 600.0
    told: list[Any]

    def __init__(self) -> None:
        self.told = []
        self.sent: list[Any] = []
        self.rejoin: Callable[[], Any] = lambda: None

    def share_memory(self, server: int, kinds: Any) -> None:
        pass

    def send_buffers(self, server: int, kinds: Any) -> list[Any]:
        return [np.zeros(shape, dtype) for shape, dtype in kinds]

    def request(self, server: int, question: Any) -> Any:
        if isinstance(question, QueryJobOver):
            raise EvictedError("left out")
        return FIRST, []

    def send(self, server: int, question: Any, buffers: Any) -> None:
        self.sent.append(question)

    def receive_all(self, on_response: Callable[[int, Response], None]) -> Any:
        answer = Values(1, step=1, ticket=SECOND, counted_serials=(FIRST.serial,))
        on_response(HEAD, answer)
        self.told.append(self.rejoin())
        on_response(1, Values(1))
        return [(answer, []), (Values(1), [])]


class Subtracting(Servers):
    """Two servers, each of which subtracts what it is sent from its variable, at first zero."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets = iter(TICKETS)
        self.values = [np.zeros(2, np.float32), np.zeros(2, np.float32)]

    def request(self, server: int, question: Any) -> Any:
        return next(self.tickets), []

    def send(self, server: int, question: Any, buffers: Any) -> None:
        self.values[server] = self.values[server] - buffers[0]

    def receive_all(self, on_response: Callable[[int, Response], None]) -> Any:
        answers = [(Values(1, dtypes=("float32",), shards=1), [memoryview(value)]) for value in self.values]
        for server, (answer, _) in enumerate(answers):
            on_response(server, answer)
        return answers


def placed(client: Any, **rules: bool) -> ParameterServerMerge:
    all_rules = SimpleNamespace(**{"synchronous": True, "overlap": False, "refuse_nan": False} | rules)
    worker: Any = SimpleNamespace(client=client, rules=all_rules, compression=None, workers=2, number=0, global_step=0)
    merge = ParameterServerMerge(worker)
    variables = [PlacedVariable(name, (2,), "float32") for name in "ab"]
    shards = [Shard(index, 0, 2, index) for index in range(2)]
    merge.set_variables(0, PlacedVariables(variables, shards, 2), None)
    return merge


def test_one_that_was_stopped_asks_the_head_before_others_apply_what_it_has(monkeypatch: pytest.MonkeyPatch):
    client = Servers()
    merge = placed(client)
    merge.next_ticket(0, 0)
    later = time.monotonic() + client.timeout_s
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(EvictedError):
        merge._step([np.zeros(2, np.float32)] * 2, (), (), 1.0)
    assert client.sent == []


def test_what_the_head_has_answered_is_told_its_successor_though_another_server_has_not_answered_yet():
    client = Servers()
    merge = placed(client)
    client.rejoin = lambda: merge.rejoin(HEAD, 0)
    assert merge.next_ticket(0, 0) == FIRST
    merge._step([np.zeros(2, np.float32)] * 2, (), (), 1.0)
    (rejoin,) = client.told
    assert rejoin.finished == FIRST.serial
    assert rejoin.tickets == (SECOND,)
    assert (rejoin.batches, rejoin.steps_taken, rejoin.step) == (2, 1, 1)
    assert rejoin.counted_serials == (FIRST.serial,)


@pytest.mark.parametrize(("overlap", "seen"), [(False, [-1, -3, -6]), (True, [None, -1, -3])])
def test_an_asynchronous_worker_computes_with_weights_that_lack_its_last_update_only_in_an_overlapped_step(
    overlap: bool, seen: list[int | None]
):
    # Otherwise gradients are three updates old with two workers, and not one. SGD(0.1, momentum=0.9) then diverges.
    merge = placed(Subtracting(), synchronous=False, overlap=overlap)
    after: list[int | None] = []
    for step in (1, 2, 3):
        merge.next_ticket(0, 0)
        values = merge._step([np.full(2, step, np.float32)] * 2, (), (), 1.0)
        after.append(int(values[0][0]) if values else None)
    assert after == seen
