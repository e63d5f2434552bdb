"""Someone on the path of a connection changes nothing and learns nothing. All without TLS."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job_config import Encryption
from phalanx.errors import FrameError, LinkClosedError
from phalanx.transport import encryption
from phalanx.transport.address import Address
from phalanx.transport.credentials import Credentials, is_local
from phalanx.transport.dial import RefusedError, dial
from phalanx.transport.encryption import KEY_BYTES, MAX_PLAIN_BYTES, RecordReader, RecordWriter
from phalanx.transport.handshake import OPENING_BYTES, PROOF_BYTES, Hello
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.ports import listen
from tests.security.attacker import TO_LISTENER, Change, proxy_to
from tests.transport.conftest import SECRET, Echo, soon, wait_until

HANDSHAKE_BYTES = OPENING_BYTES + PROOF_BYTES
SENTENCE = b"the weights of a model, and a function to run"


@contextlib.contextmanager
def task(name: str, encryption: Encryption = Encryption.ALWAYS) -> Iterator[tuple[Address, Echo]]:
    """The port of a task, and the links that it accepted."""
    service = Echo()
    sockets = [listen(socket.AF_INET, ("127.0.0.1", 0))]
    with Listener(sockets, task=name, credentials=Credentials(SECRET, encryption=encryption), job="job") as listener:
        listener.register("mesh", service)
        yield Address("127.0.0.1", listener.port), service
    for link in service.links:
        link.close()


def connect(address: Address, *, peer: str = "worker/1", **options: object) -> Link:
    hello = Hello(purpose="mesh", task="worker/0", peer=peer, job="job", details=SENTENCE)
    credentials = Credentials(SECRET, **options)  # type: ignore[arg-type]
    return dial(address, hello, credentials=credentials, bulk=bool(options), deadline=soon())[0]


@contextlib.contextmanager
def relayed(change: Change = lambda direction, chunk, before: chunk) -> Iterator[tuple[Link, Link, list[bytearray]]]:
    """Both ends of a connection, and what the proxy between them saw each way."""
    with task("worker/1") as (address, service), proxy_to(address, change) as proxy:
        link = connect(proxy.address)
        wait_until(lambda: service.links)
        with contextlib.closing(link):
            yield link, service.links[0], list(proxy.seen)


def test_who_listens_learns_nothing() -> None:
    with relayed() as (link, other, seen):
        link.send(SENTENCE, [SENTENCE], deadline=soon())
        header, (buffer,) = other.receive(deadline=soon())
        assert (header, bytes(buffer)) == (SENTENCE, SENTENCE)
        link.send_bytes([memoryview(SENTENCE)], deadline=soon())
        assert other.wait_readable(deadline=soon())
        assert all(word not in bytes(each) for each in seen for word in (SENTENCE, b"mesh", b"worker", b"job"))


def test_a_connection_that_is_relayed_to_another_task_opens_no_service() -> None:
    """The attack: a stranger relays a handshake to another task than the dialer means."""
    with task("worker/2") as (address, service), proxy_to(address) as proxy:
        with pytest.raises(RefusedError, match="this port is that of worker/2, not of worker/1"):
            connect(proxy.address)
        assert not service.links


@pytest.mark.parametrize("at", [*range(0, HANDSHAKE_BYTES, 9), *range(HANDSHAKE_BYTES, HANDSHAKE_BYTES + 40, 7)])
def test_a_byte_changed_in_handshake_or_hello_keeps_the_dialer_out(at: int) -> None:
    def change(direction: int, chunk: bytes, before: int) -> bytes:
        if direction == TO_LISTENER and before <= at < before + len(chunk):
            return chunk[: at - before] + bytes([chunk[at - before] ^ 1]) + chunk[at - before + 1 :]
        return chunk

    with task("worker/1") as (address, service), proxy_to(address, change) as proxy:
        with pytest.raises(Exception, match="worker/1"):
            connect(proxy.address)
        assert not service.links


def garbled(chunk: bytes) -> bytes:
    return chunk[:-1] + bytes([chunk[-1] ^ 1])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(garbled, id="changed"),
        pytest.param(lambda chunk: chunk + chunk, id="repeated"),
        pytest.param(lambda chunk: b"\0\0\0\x14" + bytes(20) + chunk, id="injected"),
        pytest.param(lambda chunk: b"\xff\xff\xff\xff" + chunk, id="huge"),
        pytest.param(lambda chunk: b"", id="left out"),
    ],
)
def test_a_record_that_is_not_the_next_one_ends_the_connection(change: Callable[[bytes], bytes]) -> None:
    attacks: list[bytes] = []

    def attack(direction: int, chunk: bytes, before: int) -> bytes:
        if not attacks or direction != TO_LISTENER:
            return chunk
        attacks.pop()
        return change(chunk)

    with relayed(attack) as (link, other, _):
        link.send(b"one", deadline=soon())
        assert other.receive(deadline=soon())[0] == b"one"
        attacks.append(b"now")
        link.send(b"two", deadline=soon())
        wait_until(lambda: not attacks)
        link.send(b"three", deadline=soon())
        received: list[bytes] = []
        with pytest.raises(LinkClosedError, match=r"changed on its way|was announced"):
            receive_all(other, received)
        assert received in ([], [b"two"])


def receive_all(link: Link, received: list[bytes]) -> NoReturn:
    while True:
        received.append(link.receive(deadline=soon())[0])


def test_records_in_another_order_do_not_open() -> None:
    writer = RecordWriter(b"k" * KEY_BYTES)
    first, second = (bytes(writer.seal([memoryview(text)])[0]) for text in (b"one", b"two"))
    with pytest.raises(FrameError, match="changed on its way"):
        opened(second + first)


def test_records_of_another_connection_or_direction_do_not_open() -> None:
    record, _ = RecordWriter(b"other key of 32 bytes for a test").seal([memoryview(b"one")])
    with pytest.raises(FrameError, match="changed on its way"):
        opened(bytes(record))


def opened(data: bytes, step: int = 1 << 16, key: bytes = b"k" * KEY_BYTES) -> bytes:
    reader, found = RecordReader(key), bytearray()
    target = memoryview(bytearray(1 << 15))
    while True:
        while reader.open():
            count = reader.take(target)
            found += target[:count]
        if not data:
            return bytes(found)
        count = min(step, len(reader.get_buffer()), len(data))
        reader.get_buffer()[:count] = data[:count]
        reader.buffer_updated(count)
        data = data[count:]


@given(
    sizes=st.lists(st.integers(0, 3 * MAX_PLAIN_BYTES) | st.integers(0, 100), max_size=8),
    step=st.sampled_from([1000, 65537, 1 << 20]),
)
def test_what_is_sealed_opens(sizes: list[int], step: int) -> None:
    plain = [bytes([number]) * size for number, size in enumerate(sizes)]
    writer, sealed = RecordWriter(b"k" * KEY_BYTES), bytearray()
    pieces = [memoryview(piece) for piece in plain if piece]
    while pieces:
        record, size = writer.seal(pieces)
        sealed += record
        pieces = [memoryview(b"".join(pieces)[size:])] if size < sum(map(len, pieces)) else []
    assert opened(bytes(sealed), step) == b"".join(plain)


@given(st.binary(max_size=200))
def test_no_random_bytes_open(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        assert opened(data) == b""


def test_a_key_is_replaced_at_both_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "RECORDS_OF_A_KEY", 3)
    writer, texts = RecordWriter(b"k" * KEY_BYTES), [bytes([number]) for number in range(10)]
    records = [bytes(writer.seal([memoryview(text)])[0]) for text in texts]
    assert opened(b"".join(records)) == b"".join(texts)
    assert len({record[4:5] for record in records}) > 3


@pytest.mark.parametrize(
    ("own", "others", "encrypted"),
    [
        (Encryption.ALWAYS, Encryption.ALWAYS, True),
        (Encryption.NEVER, Encryption.NEVER, False),
        (Encryption.REMOTE, Encryption.REMOTE, False),  # both are here
        (Encryption.NEVER, Encryption.ALWAYS, True),
        (Encryption.ALWAYS, Encryption.NEVER, True),
    ],
)
def test_bulk_connections_are_encrypted_as_either_end_wants(
    own: Encryption, others: Encryption, *, encrypted: bool
) -> None:
    with task("worker/1", others) as (address, service):
        link = connect(address, encryption=own)
        wait_until(lambda: service.links)
        assert link.encrypted is service.links[0].encrypted is encrypted
        link.send(b"hello", deadline=soon())
        assert service.links[0].receive(deadline=soon())[0] == b"hello"
        link.close()


def test_all_other_connections_are_always_encrypted() -> None:
    with task("worker/1", Encryption.NEVER) as (address, service):
        hello = Hello(purpose="mesh", task="worker/0", peer="worker/1", job="job")
        link, _ = dial(address, hello, credentials=Credentials(SECRET, encryption=Encryption.NEVER), deadline=soon())
        wait_until(lambda: service.links)
        assert link.encrypted
        assert service.links[0].encrypted
        link.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_connection_within_the_host_is_local(host: str) -> None:
    with socket.create_server((host, 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            assert is_local(near)
            assert is_local(far)


def test_a_hello_without_the_name_of_the_other_task_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="peer"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"purpose": "mesh", "task": "worker/0"}), type=Hello)
