"""Many connections at once keep no member out: idle ones, those of one address, and a crowd of members."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter

import pytest

from phalanx.errors import PhalanxError
from phalanx.transport import pending_connections
from phalanx.transport.credentials import Credentials
from phalanx.transport.dial import dial
from phalanx.transport.frames import MAGIC, FrameReader
from phalanx.transport.handshake import Handshake, Hello, Role
from phalanx.transport.link import Link
from tests.transport.conftest import SECRET, Port, open_port, soon, wait_until

MEMBERS = 300
HELLO = Hello(purpose="mesh", task="worker/1", peer="worker/0", job="job")


def dial_in(port: Port) -> Link:
    return dial(port.address, HELLO, credentials=Credentials(SECRET), deadline=soon(30))[0]


@pytest.mark.parametrize("says", [b"", Handshake(Role.DIALER, b"a guess").data_to_send()], ids=["silent", "half done"])
def test_one_address_cannot_take_the_places_of_others(says: bytes) -> None:
    with open_port() as port, contextlib.ExitStack() as stack:
        for _ in range(pending_connections.MAX_ARRIVALS + 50):
            stranger = socket.create_connection((port.address.host, port.address.port), source_address=("127.0.0.2", 0))
            stack.enter_context(stranger).sendall(says)
        for _ in range(5):
            dial_in(port).close()  # at the first attempt
        addresses = Counter(arrival.link.peer.rpartition(":")[0] for arrival in port.listener._arrivals._arrivals)
        assert addresses["127.0.0.2"] <= pending_connections.MAX_ARRIVALS


def test_where_all_sources_have_as_many_the_oldest_connection_is_dropped_no_sooner_than_others() -> None:
    with open_port() as port, contextlib.ExitStack() as stack:
        pending = port.listener._arrivals._arrivals
        for number in range(1, 101):
            stack.enter_context(
                socket.create_connection(
                    (port.address.host, port.address.port), source_address=(f"127.0.1.{number}", 0)
                )
            )
            wait_until(lambda number=number: len(pending) == number)
        before = list(pending)
        for _ in range(20):
            port.listener._arrivals.drop_one("too many connected at once")
        assert set(pending) != set(before[20:])  # by chance in 1 of 5e20 cases


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ],
)
def test_all_addresses_of_a_host_are_one_source(address: str, source: str) -> None:
    assert pending_connections.source_of(address) == source


def test_a_member_gets_in_beside_a_flood_from_its_own_address() -> None:
    with open_port() as port, contextlib.ExitStack() as stack:
        stopped = threading.Event()

        def flood() -> None:
            while not stopped.is_set():
                with contextlib.suppress(OSError):
                    stack.enter_context(port.connect())

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            for _ in range(5):
                keep_dialling(port).close()
        finally:
            stopped.set()
            thread.join()


def keep_dialling(port: Port) -> Link:
    deadline = time.monotonic() + 30
    while True:
        try:
            return dial_in(port)
        except PhalanxError:
            assert time.monotonic() < deadline


def test_a_crowd_of_members_gets_in() -> None:
    with open_port() as port:
        links: list[Link] = []
        threads = [threading.Thread(target=lambda: links.append(keep_dialling(port))) for _ in range(MEMBERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(links) == MEMBERS
        wait_until(lambda: len(port.service.links) >= MEMBERS)
        for link in links:
            link.close()


def test_a_huge_buffer_that_is_only_announced_takes_no_memory() -> None:
    reader = FrameReader()
    head = MAGIC + (0).to_bytes(4, "big") + (1).to_bytes(4, "big") + (1 << 36).to_bytes(8, "big")
    before = resident_bytes()
    with contextlib.suppress(PhalanxError):  # where the system does not promise more than it has
        while head:
            count = min(len(head), len(reader.get_buffer()))
            reader.get_buffer()[:count] = head[:count]
            reader.buffer_updated(count)
            head = head[count:]
    assert resident_bytes() - before < 64e6


def resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS"))
