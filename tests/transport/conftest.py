"""Pairs of links and a listening port, all closed after the test."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phalanx.config.job_config import TLSFiles
from phalanx.transport.address import Address
from phalanx.transport.credentials import Credentials
from phalanx.transport.encryption import KEY_BYTES, SessionKeys
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.ports import listen
from phalanx.transport.tls import TLS, load_tls

SECRET = b"a secret for tests only"


def soon(seconds: float = 10.0) -> float:
    """A deadline that no passing test comes near."""
    return time.monotonic() + seconds


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = soon(seconds)
    while not condition():
        assert time.monotonic() < deadline, "the awaited condition did not come about"
        time.sleep(0.01)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def tls_pair(files: TLSFiles) -> tuple[socket.socket, socket.socket]:
    tls = load_tls(files)
    assert tls is not None
    one, other = tcp_pair()
    one = tls.dialer.wrap_socket(one, do_handshake_on_connect=False)
    other = tls.listener.wrap_socket(other, server_side=True, do_handshake_on_connect=False)
    accepting = threading.Thread(target=other.do_handshake)
    accepting.start()
    one.do_handshake()
    accepting.join()
    return one, other


def make_certificates(directory: Path) -> dict[str, TLSFiles]:
    """An authority with a member's certificate, and a foreign authority with one."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is needed to make certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)

    files = {}
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
    for name in ("ours", "theirs"):
        openssl(
            "req", "-x509", *new_key, "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}-ca.key",
            "-out", f"{name}-ca.pem",
        )  # fmt: skip
        openssl("req", *new_key, "-subj", f"/CN={name} member", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key",
            "-days", "2", "-set_serial", "1", "-out", f"{name}.pem",
        )  # fmt: skip
        files[name] = TLSFiles(directory / f"{name}.pem", directory / f"{name}.key", directory / f"{name}-ca.pem")
    return files


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TLSFiles]:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["socketpair", "tcp", "tls", "encrypted"])
def links(request: pytest.FixtureRequest) -> Iterator[tuple[Link, Link]]:
    """Two ends of one connection, of each kind."""
    if request.param == "socketpair":
        one, other = socket.socketpair()
    elif request.param == "tls":
        one, other = tls_pair(request.getfixturevalue("certificates")["ours"])
    else:
        one, other = tcp_pair()
    pair = Link(one, "other"), Link(other, "one")
    if request.param == "encrypted":
        keys = SessionKeys(b"1" * KEY_BYTES, b"2" * KEY_BYTES)
        pair[0].encrypt(keys)
        pair[1].encrypt(SessionKeys(keys.receiving, keys.sending))
    yield pair
    for link in pair:
        link.close()


@dataclass
class Echo:
    """A service that keeps the links it is given."""

    welcome: Welcome = field(default_factory=Welcome)
    links: list[Link] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)

    def admit(self, hello: Hello) -> Welcome:
        return self.welcome

    def adopt(self, hello: Hello, link: Link) -> None:
        self.hellos.append(hello)
        self.links.append(link)


@dataclass
class Port:
    """A listener of task worker/0 that serves `mesh`."""

    listener: Listener
    service: Echo

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.listener.port)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), timeout=10)


@contextlib.contextmanager
def open_port(*, secret: bytes | None = SECRET, tls: TLS | None = None) -> Iterator[Port]:
    sockets = [listen(socket.AF_INET, ("127.0.0.1", 0))]
    service = Echo()
    with Listener(sockets, task="worker/0", credentials=Credentials(secret, tls), job="job") as listener:
        listener.register("mesh", service)
        yield Port(listener, service)
    for link in service.links:
        link.close()


@pytest.fixture
def port() -> Iterator[Port]:
    with open_port() as port:
        yield port
