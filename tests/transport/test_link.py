"""Links of each kind: frames and raw bytes get through, deaths and timeouts are told apart."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from phalanx.config.job_config import TLSFiles
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError
from phalanx.transport import dead_peers, tcp_state
from phalanx.transport import link as link_module
from phalanx.transport.link import Link, wait_until_delivered
from phalanx.transport.tcp_state import host_silence_s
from phalanx.transport.wires import skip_bytes
from tests.transport.conftest import soon, tcp_pair, tls_pair, wait_until

Pair = tuple[Link, Link]


def test_a_frame_arrives_as_it_was_sent(links: Pair) -> None:
    a, b = links
    array = np.random.default_rng(0).random((500, 1000))
    sender = threading.Thread(target=a.send, args=(b"header", [array, b"", b"x"]), kwargs={"deadline": soon()})
    sender.start()
    header, buffers = b.receive(deadline=soon())
    sender.join()
    assert header == b"header"
    np.testing.assert_array_equal(np.frombuffer(buffers[0]).reshape(array.shape), array)
    assert [bytes(buffer) for buffer in buffers[1:]] == [b"", b"x"]


def test_raw_bytes_may_follow_a_frame(links: Pair) -> None:
    a, b = links
    a.send(b"frame", [b"payload"], deadline=soon())
    assert a.try_send([memoryview(b"ra"), memoryview(b""), memoryview(b"w")]) == 3
    assert b.receive(deadline=soon())[0] == b"frame"
    buffer = memoryview(bytearray(10))
    assert b.wait_readable(deadline=soon())
    assert b.try_receive_into(buffer) == 3
    assert bytes(buffer[:3]) == b"raw"
    assert b.try_receive_into(buffer) == 0


def test_many_small_buffers_arrive_in_order(links: Pair) -> None:
    a, b = links
    buffers = [bytes([number % 256]) * (number % 5) for number in range(3000)]
    sender = threading.Thread(target=a.send, args=(b"", buffers), kwargs={"deadline": soon()})
    sender.start()
    assert [bytes(buffer) for buffer in b.receive(deadline=soon())[1]] == buffers
    sender.join()


def test_try_send_says_zero_when_it_would_block_and_goes_on_later(links: Pair) -> None:
    a, b = links
    data = memoryview(os.urandom(1 << 20))
    sent = 0
    while count := a.try_send([data[sent % len(data) :]]):
        sent += count
    received = bytearray()
    buffer = memoryview(bytearray(1 << 16))
    while len(received) < sent:
        count = b.try_receive_into(buffer)
        received += buffer[:count]
        if not count:
            assert b.wait_readable(deadline=soon())
    expected = bytes(data) * (sent // len(data) + 1)
    assert received == expected[:sent]


def test_the_end_of_the_peer_raises_link_closed(links: Pair) -> None:
    a, b = links
    a.send(b"last words", deadline=soon())
    a.close()
    a.close()
    wait_until(b.peer_closed)
    assert b.receive(deadline=soon())[0] == b"last words"
    with pytest.raises(LinkClosedError, match="one closed the connection"):
        b.receive(deadline=soon())
    with pytest.raises(LinkClosedError, match="closed by this process"):
        a.send(b"", deadline=soon())
    assert a.fileno() == -1


@pytest.mark.parametrize("links", ["tls"], indirect=True)
def test_the_end_of_one_link_does_not_end_another_that_the_same_thread_reads(
    links: Pair, certificates: dict[str, TLSFiles]
) -> None:
    a, b = links
    for _ in range(5):
        other, ended = (Link(sock, "other") for sock in tls_pair(certificates["ours"]))
        other.try_receive_into(memoryview(bytearray(10)))
        ended.close()
        wait_until(other.peer_closed)
        other.try_send([memoryview(b"unread")])
        wait_until(lambda link=other: select.select([link], [], [link], 0)[0])
        for call in (other.try_receive_into, lambda buffer, link=other: link.try_send([buffer])):
            with pytest.raises(LinkClosedError):
                call(memoryview(bytearray(10)))
            assert b.try_receive_into(memoryview(bytearray(10))) == 0
    a.send(b"still here", deadline=soon())
    assert b.receive(deadline=soon())[0] == b"still here"


def test_after_finish_the_peer_reads_to_the_end_and_can_still_answer(links: Pair) -> None:
    a, b = links
    a.send(b"question", deadline=soon())
    a.finish()
    assert b.receive(deadline=soon())[0] == b"question"
    b.send(b"answer", deadline=soon())
    assert a.receive(deadline=soon())[0] == b"answer"


def test_a_peer_that_sends_nothing_raises_link_timeout_and_receive_can_be_repeated(links: Pair) -> None:
    a, b = links
    with pytest.raises(LinkTimeoutError, match="one sent nothing"):
        b.receive(deadline=time.monotonic() + 0.05)
    pieces = link_module.encode_frame(b"header", [b"payload"])
    a.try_send([pieces[0][:5]])
    with pytest.raises(LinkTimeoutError, match="only part of a message"):
        b.receive(deadline=time.monotonic() + 0.2)
    a.try_send([pieces[0][5:], *pieces[1:]])
    assert b.receive(deadline=soon())[0] == b"header"


def test_a_peer_that_does_not_read_raises_link_timeout_and_closes_the_half_sent_frame(links: Pair) -> None:
    a, _ = links
    with pytest.raises(LinkTimeoutError, match="other did not read"):
        a.send(b"", [np.zeros(50_000_000, np.uint8)], deadline=time.monotonic() + 0.2)
    assert a.closed


def test_what_follows_a_message_that_was_not_read_in_time_arrives_as_it_was_sent_or_not_at_all(links: Pair) -> None:
    a, b = links
    sent = 0
    with contextlib.suppress(LinkTimeoutError):
        while True:
            a.send(b"%d" % sent, [bytes(7000)], deadline=time.monotonic() + 0.05)
            sent += 1
    with contextlib.suppress(LinkClosedError):  # with TLS, what is on the way may be lost with the connection
        for number in range(sent):
            assert b.receive(deadline=soon())[0] == b"%d" % number
        with contextlib.suppress(LinkClosedError):
            a.send(b"next", [b"short"], deadline=soon())
        header, buffers = b.receive(deadline=soon())
        assert header == b"next"
        assert [bytes(buffer) for buffer in buffers] == [b"short"]


def test_what_is_no_frame_closes_the_link(links: Pair) -> None:
    a, b = links
    a.try_send([memoryview(b"GET / HTTP/1.1\r\n\r\n")])
    with pytest.raises(FrameError, match="from one: expected a frame"):
        b.receive(deadline=soon())
    assert b.closed


def test_closing_a_link_wakes_the_thread_that_waits_for_it(links: Pair) -> None:
    a, _ = links
    errors = []

    def receive() -> None:
        try:
            a.receive(deadline=soon())
        except LinkClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    time.sleep(0.05)  # Most likely it waits by now; the outcome is the same if it does not.
    a.close()
    waiting.join(10)
    assert len(errors) == 1


def test_a_link_that_is_closed_while_its_health_is_checked_was_closed_by_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = tcp_pair()
    link, descriptor = Link(one, "other"), one.fileno()
    idle, end_of_idle = socket.socketpair()
    monkeypatch.setattr(link_module, "ALIVE_CHECK_INTERVAL_S", 0.01)
    look = tcp_state.host_silence_s

    def close_first(sock: socket.socket) -> float:
        if not link.closed:
            link.close()  # as another thread does after `check_alive` has seen that the link is open
            os.dup2(idle.fileno(), descriptor)  # and the next file that is opened gets its descriptor
        return look(sock)

    monkeypatch.setattr(tcp_state, "host_silence_s", close_first)
    with pytest.raises(LinkClosedError, match="closed by this process"):
        link.receive(deadline=time.monotonic() + 1)
    os.close(descriptor)
    for sock in (other, idle, end_of_idle):
        sock.close()


def test_an_empty_buffer_receives_nothing_and_is_no_end_of_stream(links: Pair) -> None:
    assert links[0].try_receive_into(memoryview(b"")) == 0
    assert links[0].try_send([]) == 0


def test_a_reset_connection_raises_link_closed() -> None:
    one, other = tcp_pair()
    a = Link(one, "other")
    # Linger 0: close sends a reset.
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    other.close()
    wait_until(a.peer_closed)
    with pytest.raises(LinkClosedError):
        a.receive(deadline=soon())
    a.close()


def test_tcp_links_notice_dead_hosts_and_do_not_delay_small_messages() -> None:
    one, other = tcp_pair()
    link = Link(one, "other")
    option = socket.IPPROTO_TCP
    assert one.getsockopt(option, socket.TCP_NODELAY)
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert one.getsockopt(option, socket.TCP_KEEPIDLE) == dead_peers.KEEPALIVE_IDLE_S
    assert one.getsockopt(option, socket.TCP_KEEPINTVL) == dead_peers.KEEPALIVE_INTERVAL_S
    assert one.getsockopt(option, socket.TCP_KEEPCNT) == dead_peers.KEEPALIVE_PROBES
    link.check_alive()
    assert host_silence_s(one) == 0.0
    link.close()
    other.close()


def test_the_fields_of_tcp_info_are_where_we_read_them() -> None:
    class FakeSocket:
        family = socket.AF_INET

        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            info = bytearray(size)
            info[2] = 3  # tcpi_retransmits
            info[56:60] = (26_000).to_bytes(4, sys.byteorder)  # tcpi_last_ack_recv
            return bytes(info)

    assert host_silence_s(FakeSocket()) == 26.0  # type: ignore[arg-type]


def test_the_kill_of_the_peers_process_is_noticed_at_once_though_its_forked_children_live() -> None:
    """A data loader's forked workers must not keep the connection of their dead parent open."""
    one, other = tcp_pair()
    script = """
import os, socket, sys, time
from phalanx.transport.link import Link
link = Link(socket.socket(fileno=int(sys.argv[1])), "parent")
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
link.send(b"forked", deadline=time.monotonic() + 10)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(other.fileno())], pass_fds=[other.fileno()], start_new_session=True
    )
    other.close()
    a = Link(one, "child")
    try:
        assert a.receive(deadline=soon(60))[0] == b"forked"
        process.kill()
        with pytest.raises(LinkClosedError):
            a.receive(deadline=soon())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        a.close()


def test_a_fork_leaves_the_parents_connection_open() -> None:
    one, other = tcp_pair()
    a, b = Link(one, "other"), Link(other, "one")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if a.closed and b.closed else 1)
    assert os.waitpid(pid, 0)[1] == 0
    a.send(b"still here", deadline=soon())
    assert b.receive(deadline=soon())[0] == b"still here"
    a.close()
    b.close()


def test_links_can_be_polled() -> None:
    one, other = socket.socketpair()
    a, b = Link(one, "other"), Link(other, "one")
    poller = select.poll()
    poller.register(b, select.POLLIN)
    assert not poller.poll(0)
    a.send(b"", deadline=soon())
    assert poller.poll(10_000)
    a.close()
    b.close()


def test_skip_bytes_leaves_the_rest() -> None:
    pieces = [memoryview(b"abc"), memoryview(b""), memoryview(b"de")]
    assert [bytes(piece) for piece in skip_bytes(pieces, 0)] == [b"abc", b"", b"de"]
    assert [bytes(piece) for piece in skip_bytes(pieces, 3)] == [b"de"]
    assert [bytes(piece) for piece in skip_bytes(pieces, 4)] == [b"e"]
    assert skip_bytes(pieces, 5) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what has not arrived")
class TestSettling:
    def test_it_waits_until_all_has_arrived(self) -> None:
        a, b = (Link(sock, "peer") for sock in tcp_pair())
        with contextlib.closing(a), contextlib.closing(b):
            fill(a)
            assert a.unacknowledged_bytes() > 0
            wait_until_delivered([a], at_most_s=0.05)
            assert a.unacknowledged_bytes() > 0, "the other end does not read"
            reader = threading.Thread(target=read_all, args=(b,))
            reader.start()
            wait_until_delivered([a])
            assert a.unacknowledged_bytes() == 0
            a.finish()
            reader.join()

    def test_a_peer_that_is_gone_is_not_waited_for(self) -> None:
        a, b = (Link(sock, "peer") for sock in tcp_pair())
        with contextlib.closing(a):
            fill(a)
            b.close()  # with unread bytes: a reset
            wait_until(lambda: a.unacknowledged_bytes() == 0)
            wait_until_delivered([a], at_most_s=60)


def fill(link: Link) -> None:
    """Send until neither kernel takes more."""
    while link.try_send([memoryview(bytes(1 << 16))]):
        pass


def read_all(link: Link) -> None:
    buffer = memoryview(bytearray(1 << 16))
    with contextlib.suppress(LinkClosedError):
        while link.wait_readable(deadline=soon()):
            link.try_receive_into(buffer)
