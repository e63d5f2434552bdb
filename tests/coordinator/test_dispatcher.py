"""The coordinator's own end, without workers' processes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from phalanx.cluster.peer_identification import PROBE, ProbeService
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.job_config import JobConfig
from phalanx.coordinator.accepted_workers import WORKER_PURPOSE
from phalanx.coordinator.coordinator_messages import CallFunction, FunctionRaised, FunctionReturned, Ping
from phalanx.coordinator.dispatcher import Dispatcher
from phalanx.coordinator.remote_values import RemoteValue
from phalanx.coordinator.scheduled_calls import ScheduledCall
from phalanx.coordinator.worker_connection import WorkerConnection
from phalanx.errors import LinkClosedError, LinkTimeoutError, PeerLostError, RendezvousError
from phalanx.parameter_server.client import server_dialing
from phalanx.parameter_server.client.server_dialing import connect
from phalanx.runtime import function_call as calls
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener

BOUND_S = 20.0


@pytest.fixture
def identities() -> tuple[TaskIdentity, TaskIdentity]:
    """Of the chief and of a worker, who give up soon."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        chief, server = (f"127.0.0.1:{free.getsockname()[1]}" for free in (first, second))
    spec = ClusterSpec({"ps": [server], "chief": [chief], "worker": ["127.0.0.1:2"]})
    config = JobConfig(secret=b"0123456789abcdef", rendezvous_timeout_s=2.0, timeout_s=2.0)
    return TaskIdentity(spec, Task("chief", 0), JobFacts(), config), TaskIdentity(
        spec, Task("worker", 0), JobFacts(), config
    )


@pytest.fixture
def dispatcher(identities: tuple[TaskIdentity, TaskIdentity]) -> Iterator[Dispatcher]:
    made = Dispatcher(identities[0], lambda changes, step: None, set())
    made.start()
    made.accept(WORKER_PURPOSE)
    yield made
    made.close()


def call(dispatcher: Dispatcher, number: int, **keeps: object) -> RemoteValue:
    result = RemoteValue(number, dispatcher.wait_for, None)  # type: ignore[arg-type]
    kept = {int(name[1:]): pickle for name, pickle in keeps.items()}
    dispatcher.add(ScheduledCall(b"", b"", b"", (), kept, (), result))  # type: ignore[arg-type]
    return result


def test_without_workers_each_waiting_caller_gets_the_error(dispatcher: Dispatcher) -> None:
    result = call(dispatcher, 0)
    errors = []

    def fetch() -> None:
        try:
            result.finished()
        except RendezvousError as error:
            errors.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    with pytest.raises(RendezvousError, match="No worker connected to run functions"):
        dispatcher.join()
    thread.join(BOUND_S)
    assert len(errors) == 1


def test_what_cannot_be_sent_any_more_is_an_error_of_its_function(
    dispatcher: Dispatcher, identities: tuple[TaskIdentity, TaskIdentity]
) -> None:
    def gone() -> bytes:
        raise ValueError("it was given away")

    chief, worker = identities
    link = connect(worker, chief.task, WORKER_PURPOSE, time.monotonic() + BOUND_S)
    call(dispatcher, 0, _1=gone)
    with pytest.raises(ValueError, match="it was given away"):
        dispatcher.join()
    link.close()


def test_a_worker_waits_for_a_chief_that_has_no_coordinator_yet(
    identities: tuple[TaskIdentity, TaskIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_dialing, "HANDSHAKE_FAILURES_S", 0.0)
    chief, worker = identities
    late = Dispatcher(chief, lambda changes, step: None, set())
    late.start()
    rounds = []

    def accept_in_the_third_round() -> None:
        rounds.append(1)
        if len(rounds) == 3:
            late.accept(WORKER_PURPOSE)

    try:
        deadline = time.monotonic() + BOUND_S
        connect(worker, chief.task, WORKER_PURPOSE, deadline, check=accept_in_the_third_round).close()
    finally:
        late.close()
    assert len(rounds) >= 3


def test_a_worker_that_has_reconnected_is_not_silent_for_what_its_former_link_did(dispatcher: Dispatcher) -> None:
    workers = dispatcher.workers
    returned = WorkerConnection(1, "worker/0", "b", SimpleNamespace(close=lambda: None), True, deque())  # type: ignore[arg-type]

    class Silent:
        def receive(self, *, deadline: float) -> None:
            workers._workers[1] = returned  # it is adopted while the deadline of its former link passes
            raise LinkTimeoutError("worker/0 sent nothing", "worker/0")

        def close(self) -> None:
            pass

    former = WorkerConnection(1, "worker/0", "a", Silent(), True, deque())  # type: ignore[arg-type]
    workers._workers[1] = former
    workers._receive_from(former)
    assert not workers._silent
    workers.lose(returned, "it does not answer.", LinkTimeoutError("worker/0 sent nothing", "worker/0"))
    assert workers._silent == {"worker/0"}


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_that_a_worker_has_lost_is_asked_whether_it_is_there(
    dispatcher: Dispatcher, identities: tuple[TaskIdentity, TaskIdentity], answers: bool
) -> None:
    chief, worker = identities
    server = chief.spec.address(Task("ps", 0))
    listener = Listener([socket.create_server((server.host, server.port))], task="ps/0", credentials=chief.credentials)
    listener.register(PROBE, ProbeService(TaskIdentity(chief.spec, Task("ps", 0), JobFacts(), chief.config)))
    with contextlib.closing(listener):
        if answers:
            listener.start()
        lost = PeerLostError("lost ps/0", rank=-1, task="ps/0", host="")
        with contextlib.closing(connect(worker, chief.task, WORKER_PURPOSE, time.monotonic() + BOUND_S)) as link:
            result = call(dispatcher, 0)
            _receive(link)
            link.send(msgspec.msgpack.encode(FunctionRaised(0, "ps/0")), [calls.encode_error(lost)], deadline=_soon())
            if not answers:
                with pytest.raises(PeerLostError, match="lost ps/0"):
                    dispatcher.join()
                return
            with pytest.raises(LinkClosedError):
                _receive(link)
        with contextlib.closing(connect(worker, chief.task, WORKER_PURPOSE, time.monotonic() + BOUND_S)) as link:
            _receive(link)
            link.send(msgspec.msgpack.encode(FunctionReturned(0, 1)), [b"", b""], deadline=_soon())
            dispatcher.join()
            assert result.is_finished


def _soon() -> float:
    return time.monotonic() + BOUND_S


def _receive(link: Link) -> CallFunction:
    """The next function; a worker that has none is pinged meanwhile."""
    while isinstance(
        order := msgspec.msgpack.decode(link.receive(deadline=_soon())[0], type=CallFunction | Ping), Ping
    ):
        pass
    return order
