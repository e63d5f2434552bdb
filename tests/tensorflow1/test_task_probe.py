"""Which tasks answer, and when a job is over."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from phalanx.errors import RendezvousError
from phalanx.tensorflow1.task_probe import CLIENT_PREFACE, ProbeResult, TrainingEndDetector, probe, wait_for_tasks
from phalanx.transport.address import Address

SETTINGS_FRAME = bytes([0, 0, 6, 4, 0, 0, 0, 0, 0]) + bytes(6)
SERVES, REFUSED, SILENT = ProbeResult.SERVES, ProbeResult.REFUSED, ProbeResult.SILENT


@contextlib.contextmanager
def server(reply: bytes | None) -> Iterator[Address]:
    """A task that replies with these bytes, one by one, and closes; None: that accepts, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(100)[: len(CLIENT_PREFACE)] == CLIENT_PREFACE
                for byte in reply or b"":
                    connection.sendall(bytes([byte]))

        thread = threading.Thread(target=serve)
        if reply is not None:
            thread.start()
        yield Address("127.0.0.1", listener.getsockname()[1])
        if reply is not None:
            thread.join()


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (SETTINGS_FRAME, SERVES),
        (b"HTTP/1.1 400", SILENT),
        (SETTINGS_FRAME[:3], REFUSED),
        (b"", REFUSED),
        (None, SILENT),
    ],
)
def test_only_a_server_of_http_2_serves(reply: bytes | None, answer: ProbeResult) -> None:
    with server(reply) as address:
        assert probe(address, 5.0 if reply is not None else 0.2) is answer


def test_a_port_without_a_listener_refuses() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert probe(Address("127.0.0.1", bound.getsockname()[1])) is REFUSED


def test_waiting_names_the_tasks_that_do_not_answer() -> None:
    asked: dict[str, int] = {}

    def ask(address: Address) -> ProbeResult:
        asked[address.host] = asked.get(address.host, 0) + 1
        return SERVES if address.host == "late" and asked["late"] > 2 else SILENT

    tasks = {"ps/0": Address("late", 1), "ps/1": Address("absent", 2)}
    wait_for_tasks({"ps/0": tasks["ps/0"]}, 60.0, RendezvousError, ask)
    with pytest.raises(RendezvousError, match=r"^ps/1 at absent:2 does not answer$"):
        wait_for_tasks(tasks, 0.0, RendezvousError, ask)


def job() -> TrainingEndDetector:
    return TrainingEndDetector(["worker/0", "worker/1"], start_s=300.0, silent_s=600.0, now=0.0)


def test_a_job_is_over_when_all_tasks_have_finished() -> None:
    end = job()
    assert not end.is_over({"worker/0": SERVES, "worker/1": REFUSED}, set(), 1.0)
    assert not end.is_over({"worker/1": SERVES}, {"worker/0"}, 200.0)
    assert end.is_over({}, {"worker/0", "worker/1"}, 201.0)


def test_a_job_is_over_when_its_tasks_are_gone_for_longer_than_a_restart() -> None:
    end = job()
    gone = {"worker/0": REFUSED, "worker/1": REFUSED}
    assert not end.is_over({"worker/0": SERVES, "worker/1": SERVES}, set(), 100.0)
    assert not end.is_over(gone, set(), 110.0)
    assert not end.is_over({**gone, "worker/1": SILENT}, set(), 150.0)  # it starts again
    assert not end.is_over(gone, set(), 155.0)
    assert not end.is_over(gone, set(), 150.0 + TrainingEndDetector.GONE_S)
    assert end.is_over(gone, set(), 150.1 + TrainingEndDetector.GONE_S)


def test_a_task_that_hangs_is_gone_in_the_end() -> None:
    end = job()
    assert not end.is_over({"worker/0": SERVES}, {"worker/1"}, 10.0)
    assert not end.is_over({"worker/0": SILENT}, {"worker/1"}, 600.0)
    assert end.is_over({"worker/0": SILENT}, {"worker/1"}, 611.0 + TrainingEndDetector.GONE_S)


def test_tasks_that_never_appear_are_named() -> None:
    end = job()
    assert not end.is_over({"worker/0": SILENT, "worker/1": REFUSED}, set(), 300.0)
    with pytest.raises(RendezvousError, match="worker/0, worker/1"):
        end.is_over({"worker/0": SILENT, "worker/1": REFUSED}, set(), 301.0)
