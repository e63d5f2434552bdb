"""A name server that does not answer holds up nothing for long."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from phalanx.cluster import doctor
from phalanx.launcher.host_slots import HostSpec, find_local_name
from phalanx.tensorflow1.task_probe import ProbeResult, probe
from phalanx.transport import name_resolution
from phalanx.transport.address import Address
from phalanx.transport.ports import open_listening_sockets

FAR = Address("far.example", 1)


@pytest.fixture(autouse=True)
def _silent_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    over, real = threading.Event(), socket.getaddrinfo

    def wait_for_server(*args: object, flags: int = 0, **options: object) -> object:
        if not flags & socket.AI_NUMERICHOST:
            over.wait(60)
        return real(*args, flags=flags | socket.AI_NUMERICHOST, **options)

    monkeypatch.setattr(name_resolution, "RESOLVE_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", wait_for_server)
    monkeypatch.setattr(socket, "getfqdn", lambda: over.wait(60) and "")
    yield
    over.set()


def test_the_launcher_finds_an_address_of_this_host() -> None:
    assert Address(find_local_name([HostSpec("far.example", 1)]).strip("[]"), 1).is_ip


def test_the_doctor_says_so() -> None:
    assert doctor._resolve(FAR) == "no name server answers"


def test_a_task_of_an_unknown_address_is_silent() -> None:
    assert probe(FAR, 0.05) is ProbeResult.SILENT


def test_a_task_whose_own_name_is_asked_for_says_why_it_cannot_listen() -> None:
    with pytest.raises(Exception, match=r"cannot listen at localhost:1: .*no name server answers"):
        open_listening_sockets(Address("localhost", 1), secret=b"")
