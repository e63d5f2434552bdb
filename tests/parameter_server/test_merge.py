"""What a worker says of itself when it has lost a server, without any server."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phalanx.errors import EvictedError
from phalanx.parameter_server.client import HEAD
from phalanx.parameter_server.placed_variables import PlacedVariables
from phalanx.parameter_server.server_messages import QueryJobOver, Response, Ticket, Values
from phalanx.parameter_server.shard_placement import PlacedVariable, Shard
from phalanx.training.steps.parameter_server_step import ParameterServerMerge

FIRST, SECOND = (Ticket(0, 0, batch, (0,), 0, serial=batch + 1, era=0) for batch in (0, 1))


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
        answer = Values(1, step=1, ticket=SECOND)
        on_response(HEAD, answer)
        self.told.append(self.rejoin())
        on_response(1, Values(1))
        return [(answer, []), (Values(1), [])]


def placed(client: Servers) -> ParameterServerMerge:
    rules = SimpleNamespace(synchronous=True, refuse_nan=False)
    worker: Any = SimpleNamespace(client=client, rules=rules, compression=None, workers=1, number=0, global_step=0)
    merge = ParameterServerMerge(worker)
    variables = [PlacedVariable(name, (2,), "float32") for name in "ab"]
    shards = [Shard(index, 0, 2, index) for index in range(2)]
    merge.place(0, PlacedVariables(variables, shards, 2), None)
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
    assert (rejoin.batches, rejoin.steps_made, rejoin.step) == (2, 1, 1)
