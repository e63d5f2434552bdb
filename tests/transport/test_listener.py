"""The port: members get in, strangers get one line in the log, and nothing that they do stops it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from phalanx.config.job_config import Encryption, TLSFiles
from phalanx.errors import ConfigurationError, HandshakeError, LinkClosedError, LinkTimeoutError
from phalanx.transport import dial as dial_module
from phalanx.transport import listener as listener_module
from phalanx.transport import pending_connections, ports
from phalanx.transport.address import Address
from phalanx.transport.credentials import Credentials
from phalanx.transport.dial import RefusedError, UnreachableError, dial, retry_delay_s
from phalanx.transport.handshake import MAGIC, OPENING_BYTES, Handshake, Hello, Role, Welcome, WrongSecretError
from phalanx.transport.link import Link
from phalanx.transport.pending_connections import RefusalLog
from phalanx.transport.ports import PortTakenError, open_listening_sockets
from phalanx.transport.tls import TLS, load_tls
from tests.transport.conftest import SECRET, Echo, Port, open_port, soon, wait_until


def dial_port(
    port: Port,
    *,
    secret: bytes | None = SECRET,
    tls: TLS | None = None,
    purpose: str = "mesh",
    job: str = "job",
    seconds: float = 10,
) -> tuple[Link, Welcome]:
    hello = Hello(purpose=purpose, task="worker/1", peer="worker/0", job=job)
    return dial(port.address, hello, credentials=Credentials(secret, tls), deadline=soon(seconds))


def assert_members_get_in(port: Port, **options: TLS | None) -> None:
    before = len(port.service.links)
    link, _ = dial_port(port, **options)  # type: ignore[arg-type]
    wait_until(lambda: len(port.service.links) == before + 1)
    link.send(b"hello", deadline=soon())
    assert port.service.links[-1].receive(deadline=soon())[0] == b"hello"
    link.close()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "refused a connection" in record.getMessage()]


@pytest.fixture
def tls(certificates: dict[str, TLSFiles]) -> TLS:
    tls = load_tls(certificates["ours"])
    assert tls is not None
    return tls


@pytest.fixture
def tls_port(tls: TLS) -> Iterator[Port]:
    with open_port(tls=tls) as port:
        yield port


def test_a_member_is_handed_to_its_purpose_with_its_name(port: Port) -> None:
    port.service.welcome = Welcome(details=b"for you")
    link, welcome = dial_port(port)
    assert welcome.details == b"for you"
    wait_until(lambda: port.service.links)
    assert port.service.hellos[0].task == "worker/1"
    assert port.service.links[0].peer == "worker/1"
    link.send(b"x", deadline=soon())
    assert port.service.links[0].receive(deadline=soon())[0] == b"x"
    link.close()


def test_a_service_can_refuse_with_a_reason(port: Port) -> None:
    port.service.welcome = Welcome(refusal="full", reason="there is no room")
    with pytest.raises(RefusedError, match=r"worker/0 at .* refused: there is no room") as caught:
        dial_port(port)
    assert caught.value.welcome.refusal == "full"
    assert not port.service.links


def test_a_purpose_that_is_not_served_yet_is_refused_until_it_is(port: Port) -> None:
    with pytest.raises(RefusedError, match="does not serve 'ps'") as caught:
        dial_port(port, purpose="ps")
    assert caught.value.welcome.refusal == listener_module.UNAVAILABLE
    port.listener.register("ps", Echo())
    dial_port(port, purpose="ps")[0].close()


def test_a_task_of_another_job_is_refused(port: Port) -> None:
    with pytest.raises(RefusedError, match="job 'job', not of job 'another'"):
        dial_port(port, job="another")


def test_a_service_with_a_defect_does_not_take_the_port_down(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Echo):
        def admit(self, hello: Hello) -> Welcome:
            raise RuntimeError("a defect")

    port.listener.register("broken", Broken())
    with pytest.raises(LinkClosedError):
        dial_port(port, purpose="broken")
    wait_until(lambda: "a defect" in caplog.text)
    assert_members_get_in(port)


STRANGERS = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP client"),
    "random": (bytes(range(200, 256)), "does not speak Phalanx"),
    "length prefix of 4 GB": (b"\xff\xff\xff\xff" + b"x" * 100, "does not speak Phalanx"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00", "speaks TLS"),
    "right start, then nothing of ours": (MAGIC + b"\x01" + b"k" * 32 + b"p" * 32, "wrong secret"),
    "hangs up in the middle": (MAGIC + b"\x01" + b"k" * 9, "hung up"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_gets_one_line_and_the_port_lives_on(
    name: str, port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    data, reason = STRANGERS[name]
    with port.connect() as stranger:
        answer = b""
        # It may be thrown out, with a reset, before it has said all.
        with contextlib.suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while piece := stranger.recv(1000):
                answer += piece
    assert len(answer) <= OPENING_BYTES  # Random numbers at most.
    wait_until(lambda: refusals(caplog))
    assert_members_get_in(port)
    (line,) = refusals(caplog)
    assert reason in line
    assert "worker/0 refused a connection from 127.0.0.1:" in line
    assert reason in port.listener.refusal_summary()


def test_a_wrong_secret_is_refused_on_both_ends(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    for secret in (b"another secret of tests", None):
        with pytest.raises(WrongSecretError, match=r"PHALANX_SECRET differs"):
            dial_port(port, secret=secret)
    wait_until(lambda: len(refusals(caplog)) == 2)
    assert "wrong secret" in refusals(caplog)[0]
    assert_members_get_in(port)


def test_a_dialer_without_a_secret_gets_into_a_port_without_one() -> None:
    with open_port(secret=None) as port:
        dial_port(port, secret=None)[0].close()


def test_a_member_that_sends_no_hello_is_refused(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    with port.connect() as sock:
        link = Link(sock, "worker/0")
        dial_module._shake_hands(link, Handshake(Role.DIALER, SECRET), soon())
        link.send(msgspec.msgpack.encode({"purpose": 3}), deadline=soon())
        with pytest.raises(LinkClosedError):
            link.receive(deadline=soon())
    with port.connect() as sock:
        link = Link(sock, "worker/0")
        dial_module._shake_hands(link, Handshake(Role.DIALER, SECRET), soon())
        link.send(b"", [b"a Hello has no payload"], deadline=soon())
        with pytest.raises(LinkClosedError):
            link.receive(deadline=soon())
    assert_members_get_in(port)
    assert len(refusals(caplog)) == 2


def test_who_connects_and_says_nothing_gets_no_line(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    """Health checks of Kubernetes and port scanners do that all the time."""
    for _ in range(5):
        port.connect().close()
    assert_members_get_in(port)
    assert not refusals(caplog)


def test_thousands_of_idle_connections_keep_nobody_out(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            # Each waits for its own accept only if the backlog is full: the port keeps up.
            sock = stack.enter_context(port.connect())
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"PHA")
        assert_members_get_in(port)
        assert len(port.listener._arrivals) <= pending_connections.MAX_ARRIVALS
    assert len(refusals(caplog)) <= pending_connections.REFUSALS_PER_MINUTE


def test_a_connection_that_dawdles_is_dropped(
    port: Port, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_connections, "HANDSHAKE_TIMEOUT_S", 0.2)
    with port.connect() as stranger:
        stranger.sendall(b"PHALANX")
        assert stranger.recv(100) == b""
    wait_until(lambda: refusals(caplog))
    assert "did not complete the handshake" in refusals(caplog)[0]


def test_running_out_of_descriptors_is_survived(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = port.listener._sockets[0]

    class Exhausted:
        """The listening socket, which fails once."""

        failures = 1

        def __getattr__(self, name: str) -> object:
            return getattr(listening, name)

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return listening.accept()

    exhausted = Exhausted()
    original = port.listener._accept
    monkeypatch.setattr(port.listener, "_accept", lambda sock: original(exhausted))  # type: ignore[arg-type]
    assert_members_get_in(port)
    assert exhausted.failures == 0


def test_a_hundred_members_at_once_get_in(port: Port) -> None:
    links: list[Link] = []
    threads = [threading.Thread(target=lambda: links.append(dial_port(port)[0])) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(links) == 100
    wait_until(lambda: len(port.service.links) == 100)
    for link in links:
        link.close()


def test_closing_frees_the_port_and_the_thread_and_may_be_repeated() -> None:
    with open_port() as port:
        thread = port.listener._thread
        taken = port.connect()
        port.listener.close()
        port.listener.close()
        assert not thread.is_alive()
        taken.close()
        open_listening_sockets(port.address, secret=SECRET)[0].close()


def test_a_forked_child_does_not_keep_the_port(port: Port) -> None:
    parent, child = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        parent.close()
        child.send(b"here")
        child.recv(1)  # Until the parent is done, or gone.
        os._exit(0)
    child.close()
    with parent:
        assert parent.recv(4) == b"here"
        assert_members_get_in(port)
        port.listener.close()
        for sock in open_listening_sockets(port.address, secret=SECRET):
            sock.close()
    os.waitpid(pid, 0)


# ------------------------------------------------------------------------------- TLS


def test_members_get_in_with_tls(tls_port: Port, tls: TLS) -> None:
    assert_members_get_in(tls_port, tls=tls)


def test_plain_text_to_a_tls_port_is_refused(tls_port: Port, tls: TLS, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LinkClosedError, match=r"only one of the two ends has TLS"):
        dial_port(tls_port)
    with tls_port.connect() as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.recv(100)
    wait_until(lambda: len(refusals(caplog)) == 2)
    assert "plain text" in refusals(caplog)[0]
    assert "HTTP" in refusals(caplog)[1]
    assert_members_get_in(tls_port, tls=tls)


def test_tls_to_a_plain_port_is_refused(port: Port, tls: TLS, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises((HandshakeError, LinkClosedError)):
        dial_port(port, tls=tls)
    wait_until(lambda: refusals(caplog))
    assert "speaks TLS and this task does not" in refusals(caplog)[0]


def test_a_certificate_of_another_authority_is_refused(
    tls_port: Port, certificates: dict[str, TLSFiles], tls: TLS, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((HandshakeError, LinkClosedError), match=r"certificate|broken|closed"):
        dial_port(tls_port, tls=load_tls(certificates["theirs"]))
    # It does not accept ours; when it takes any, ours does not accept it.
    careless = load_tls(certificates["theirs"])
    assert careless is not None
    careless.dialer.verify_mode = ssl.CERT_NONE
    with pytest.raises((HandshakeError, LinkClosedError, LinkTimeoutError)):
        dial_port(tls_port, tls=careless)
    wait_until(lambda: len(refusals(caplog)) == 2)
    assert not tls_port.service.links
    assert_members_get_in(tls_port, tls=tls)


def test_files_that_are_no_certificates_are_a_configuration_error(
    certificates: dict[str, TLSFiles], tmp_path: object
) -> None:
    ours, theirs = certificates["ours"], certificates["theirs"]
    with pytest.raises(ConfigurationError, match="PHALANX_TLS_KEY"):
        load_tls(TLSFiles(ours.certificate, theirs.key, ours.authority))
    with pytest.raises(ConfigurationError, match="PHALANX_TLS_CA"):
        load_tls(TLSFiles(ours.certificate, ours.key, ours.key))


# --------------------------------------------------------------------------- dialling


def test_nobody_at_the_address_is_told_apart_from_an_unknown_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        free = Address("127.0.0.1", sock.getsockname()[1])
    hello = Hello(purpose="mesh", task="worker/1", peer="worker/0")
    with pytest.raises(LinkClosedError, match=r"nothing listens at 127.0.0.1"):
        dial(free, hello, credentials=Credentials(), deadline=soon())
    with pytest.raises(LinkClosedError, match=r"'no-such-host.invalid' of worker/0 cannot be resolved"):
        dial(Address("no-such-host.invalid", 1), hello, credentials=Credentials(), deadline=soon(30))


def test_a_server_that_never_answers_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1])
        hello = Hello(purpose="mesh", task="worker/1", peer="worker/0")
        with pytest.raises(LinkTimeoutError, match="has not answered yet"):
            dial(address, hello, credentials=Credentials(), deadline=soon(0.3))


def test_a_connection_that_is_reset_at_once_is_a_closed_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is killed resets what it has not accepted yet. Who dials tries again after such an error."""
    made = []

    def connect_and_wait_for_reset(*args: Any, **options: Any) -> socket.socket:
        sock = connect(*args, **options)
        made.append(sock)
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        assert poller.poll(10_000)
        return sock

    connect = dial_module.connect
    monkeypatch.setattr(dial_module, "connect", connect_and_wait_for_reset)
    credentials = Credentials(SECRET, encryption=Encryption.REMOTE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        hello = Hello(purpose="mesh", task="worker/1", peer="worker/0")
        with pytest.raises(LinkClosedError):
            dial(address, hello, credentials=credentials, bulk=True, deadline=soon())
    assert [sock.fileno() for sock in made] == [-1]


def test_a_server_of_another_kind_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                with contextlib.suppress(ConnectionError):
                    connection.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        address = Address("127.0.0.1", server.getsockname()[1])
        with pytest.raises(HandshakeError, match="what listens at the address of worker/0 is not it: it speaks SSH"):
            dial(
                address,
                Hello(purpose="mesh", task="worker/1", peer="worker/0"),
                credentials=Credentials(),
                deadline=soon(),
            )
        thread.join(10)


def test_the_delay_grows_with_the_time_waited_within_bounds() -> None:
    assert retry_delay_s(0) == dial_module.FIRST_RETRY_S
    assert retry_delay_s(2) == pytest.approx(0.1)
    assert retry_delay_s(1000) == dial_module.LAST_RETRY_S


# ---------------------------------------------------------------------- opening ports


def test_a_taken_port_is_a_configuration_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as sock,
        pytest.raises(PortTakenError, match="taken by another"),
    ):
        open_listening_sockets(Address("127.0.0.1", sock.getsockname()[1]), secret=SECRET)


def test_a_name_that_etc_hosts_lists_twice_takes_its_port_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        free = Address("localhost", sock.getsockname()[1])
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", free.port))
    monkeypatch.setattr(ports, "resolve", lambda address: [entry, entry])
    (listening,) = open_listening_sockets(free, secret=SECRET)
    listening.close()


def test_a_port_is_free_for_the_next_job_at_once() -> None:
    with open_port() as port:
        link, _ = dial_port(port)
        link.close()
        port.listener.close()
        for sock in open_listening_sockets(port.address, secret=SECRET):
            sock.close()


def own_address() -> str:
    """An address of this host that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no network")
        return str(sock.getsockname()[0])


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_port_that_the_kernel_chose_is_kept_while_its_socket_does_not_listen(host: str | None) -> None:
    with ports.listen_at(host) as ours, socket.socket() as other, socket.socket(ours.family) as server:
        port = ours.getsockname()[1]
        ours.shutdown(socket.SHUT_RDWR)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TensorFlow's
        server.bind(ours.getsockname())
        server.listen()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_port_that_the_kernel_chose_is_free_on_all_addresses(host: str | None) -> None:
    """A TensorFlow server listens on all of them. The kernel leaves ports to others that have different addresses."""
    with contextlib.ExitStack() as stack:
        # So many that a choice for one address alone would meet one of them, almost certainly.
        taken = [stack.enter_context(socket.create_server((own_address(), 0))).getsockname()[1] for _ in range(500)]
        for _ in range(200):
            with ports.listen_at(host) as ours:
                assert ours.getsockname()[1] not in taken


def test_a_task_listens_at_its_ip_address_only() -> None:
    own = own_address()
    with socket.create_server((own, 0)) as sock:
        free = sock.getsockname()[1]
    (sock,) = open_listening_sockets(Address(own, free), secret=SECRET)
    with sock:
        assert sock.getsockname()[0] == own
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", free), timeout=5)
    (sock,) = open_listening_sockets(Address(socket.gethostname(), free), secret=SECRET)
    with sock:  # to other hosts the name may mean another address of this one
        assert sock.getsockname()[0] in ("::", "0.0.0.0")


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: over.wait(60) and [])
    try:
        with pytest.raises(UnreachableError, match=r"cannot be resolved here \(no name server answers\)"):
            dial(
                Address("far.example", 1),
                Hello(purpose="", task="", peer="worker/1"),
                credentials=Credentials(SECRET),
                deadline=time.monotonic() + 0.1,
            )
    finally:
        over.set()


def test_a_service_that_blocks_holds_up_its_own_peer_only(port: Port) -> None:
    over = threading.Event()

    class Slow(Echo):
        def admit(self, hello: Hello) -> Welcome:
            over.wait(60)
            return super().admit(hello)

    port.listener.register("slow", Slow(), blocks=True)
    port.listener.register("echo", Echo())
    links: list[Link] = []
    waiting = threading.Thread(target=lambda: links.append(dial_port(port, purpose="slow")[0]))
    waiting.start()
    dial_port(port, purpose="echo")[0].close()
    assert waiting.is_alive()
    over.set()
    waiting.join(60)
    links[0].close()


def test_a_task_on_loopback_listens_there_only_and_one_behind_nat_everywhere(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_has_warned_no_secret", False)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        free = sock.getsockname()[1]
    sockets = open_listening_sockets(Address("localhost", free), secret=None)
    assert {sock.getsockname()[0] for sock in sockets} <= {"127.0.0.1", "::1"}
    for sock in sockets:
        sock.close()
    assert not caplog.records
    for _ in range(2):
        (sock,) = open_listening_sockets(Address("10.255.255.1", free), secret=None)
        assert sock.getsockname()[0] in ("::", "0.0.0.0")
        sock.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "PHALANX_SECRET is not set" in record.getMessage()


def test_a_descriptor_from_the_launcher_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as inherited:
        address = Address("127.0.0.1", inherited.getsockname()[1])
        (sock,) = open_listening_sockets(address, secret=SECRET, listen_fd=inherited.fileno())
        assert sock.getsockname() == inherited.getsockname()
        sock.close()
        with pytest.raises(ConfigurationError, match=r"does not listen|not a socket that listens"):
            open_listening_sockets(Address("127.0.0.1", 1), secret=SECRET, listen_fd=inherited.fileno())
    with open(os.devnull) as file, pytest.raises(ConfigurationError, match="PHALANX_LISTEN_FD"):
        open_listening_sockets(address, secret=SECRET, listen_fd=file.fileno())
    with pytest.raises(ConfigurationError, match="PHALANX_LISTEN_FD=987654 is not a socket"):
        open_listening_sockets(address, secret=SECRET, listen_fd=987654)


def test_a_forked_child_closes_no_descriptor_that_has_become_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as inherited:
        descriptor = inherited.fileno()
        address = Address("127.0.0.1", inherited.getsockname()[1])
        open_listening_sockets(address, secret=SECRET, listen_fd=descriptor)[0].close()
        with open(os.devnull) as other:
            os.dup2(other.fileno(), descriptor)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                os.fstat(descriptor)
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0


def test_refusals_are_counted_and_their_lines_limited() -> None:
    counter = RefusalLog("worker/0", 2222, lines=2, period_s=60)
    assert [counter.may_log(now=when) for when in (0, 1, 2, 3, 61.5)] == [True, True, False, False, True]
    assert counter.take_suppressed() == " (2 more were refused since the last such line.)"
    assert counter.take_suppressed() == ""
    for _ in range(3):
        counter.count("10.0.0.1", "wrong secret")
    counter.count("10.0.0.2", "HTTP")
    assert counter.summary() == "10.0.0.1 (3 times: wrong secret); 10.0.0.2 (HTTP)"


def test_a_flood_of_reasons_takes_no_memory_and_hides_no_refusal_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_connections, "MAX_REASONS", 2)
    counter = RefusalLog("worker/0", 2222)
    for reason in ("wrong secret", "it sent 1", "it sent 2", "wrong secret"):
        counter.count("10.0.0.1", reason)
    assert counter.summary() == "10.0.0.1 (2 times: wrong secret); 10.0.0.1 (it sent 1)"


def test_a_first_address_that_drops_packets_leaves_time_for_the_second(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full backlog drops what comes, as a firewall does."""
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(silent.getsockname())
        where = ("127.0.0.1", port.address.port)
        kinds = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        addresses = [(*kinds, silent.getsockname()), (*kinds, where)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        link, _ = dial_port(port, seconds=4)
        link.close()


def test_an_address_family_that_the_kernel_lacks_is_passed_over(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    where = ("127.0.0.1", port.address.port)
    addresses = [
        (9999, socket.SOCK_STREAM, 0, "", ("::1", port.address.port)),
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", where),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    link, _ = dial_port(port)
    link.close()


def test_a_name_with_an_empty_label_cannot_be_resolved(port: Port) -> None:
    hello = Hello(purpose="mesh", task="worker/1", peer="worker/0", job="job")
    with pytest.raises(LinkClosedError, match="cannot be resolved"):
        dial(Address("host..x", 2222), hello, credentials=Credentials(), deadline=soon())


@pytest.mark.parametrize("hello", [b"\x81\xa4task\xa2\xff\xfe", b"\x81\xa1x" + b"\x91" * 5000 + b"\xc0"], ids=repr)
def test_a_malformed_hello_is_refused_and_the_port_lives_on(port: Port, hello: bytes) -> None:
    """From one who knows the secret: a broken member, or anybody on a network without one."""
    link = Link(dial_module.connect(port.address, "worker/0", deadline=soon()), "worker/0")
    dial_module._shake_hands(link, Handshake(Role.DIALER, SECRET), soon())
    link.send(hello, deadline=soon())
    with pytest.raises(LinkClosedError):
        link.receive(deadline=soon())
    link.close()
    assert_members_get_in(port)
