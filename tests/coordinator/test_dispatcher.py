"""The coordinator's own end, without workers' processes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.cluster.agreement import Facts
from phalanx.cluster.roll_call import Identity
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.coordinator.dispatcher import PURPOSE, Dispatcher, ScheduledCall
from phalanx.coordinator.remote import RemoteValue
from phalanx.errors import RendezvousError
from phalanx.parameter_server.client import connect
from phalanx.settings import Settings

BOUND_S = 20.0


@pytest.fixture
def identities() -> tuple[Identity, Identity]:
    """Of the chief and of a worker, who give up soon."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    spec = ClusterSpec({"ps": ["127.0.0.1:1"], "chief": [address], "worker": ["127.0.0.1:2"]})
    settings = Settings(secret=b"0123456789abcdef", rendezvous_timeout_s=2.0, timeout_s=2.0)
    return Identity(spec, Task("chief", 0), Facts(), settings), Identity(spec, Task("worker", 0), Facts(), settings)


@pytest.fixture
def dispatcher(identities: tuple[Identity, Identity]) -> Iterator[Dispatcher]:
    made = Dispatcher(identities[0], lambda changes, step: None, set())
    made.start()
    yield made
    made.close()


def call(dispatcher: Dispatcher, number: int, **keeps: object) -> RemoteValue:
    result = RemoteValue(number, dispatcher.wait_for, None)  # type: ignore[arg-type]
    kept = {int(name[1:]): pickle for name, pickle in keeps.items()}
    dispatcher.add(ScheduledCall(b"", b"", b"", (), kept, (), result))  # type: ignore[arg-type]
    return result


def test_without_workers_whoever_waits_is_told(dispatcher: Dispatcher) -> None:
    result = call(dispatcher, 0)
    errors = []

    def fetch() -> None:
        try:
            result.finished()
        except RendezvousError as error:
            errors.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    with pytest.raises(RendezvousError, match="No worker came to run functions"):
        dispatcher.join()
    thread.join(BOUND_S)
    assert len(errors) == 1


def test_what_cannot_be_sent_any_more_is_an_error_of_its_function(
    dispatcher: Dispatcher, identities: tuple[Identity, Identity]
) -> None:
    def gone() -> bytes:
        raise ValueError("it was given away")

    chief, worker = identities
    link = connect(worker, chief.task, PURPOSE, time.monotonic() + BOUND_S)
    call(dispatcher, 0, _1=gone)
    with pytest.raises(ValueError, match="it was given away"):
        dispatcher.join()
    link.close()
