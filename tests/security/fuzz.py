"""Feeds forged bytes to every decoder that reads what another process or a file says.

    python -m tests.security.fuzz --minutes 10 [--decoder NAME ...]

A decoder returns a value or raises one of its own errors. Any other error, an input that takes longer than 10 s, or one
that takes more than 64 MB fails. With atheris installed, coverage of the Python code chooses the inputs; otherwise
mutations of valid messages do. The number of inputs is printed for each decoder.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

MAX_BYTES = 64 * 2**20
"""What a refused message may take, beyond what the process has taken before."""
MAX_INPUT_BYTES = 4096
SLOW_S = 10

Seeds = list[bytes]


@dataclass(frozen=True)
class Target:
    """A decoder.

    Attributes:
        decode: reads bytes.
        errors: what it may raise.
        seeds: valid inputs, or parts of them.
    """

    decode: Callable[[bytes], Any]
    errors: tuple[type[BaseException], ...]
    seeds: Seeds


def feed(reader: Any, content: bytes, on_bytes: Callable[[], None] = lambda: None) -> None:
    """Give a reader bytes as a socket would."""
    view = memoryview(content)
    while view:
        room = reader.get_buffer()
        count = min(len(room), len(view))
        room[:count] = view[:count]
        reader.buffer_updated(count)
        on_bytes()
        view = view[count:]


def read_frames(content: bytes) -> None:
    from phalanx.transport.frames import FrameReader

    feed(FrameReader(max_payload_bytes=2**30), content)


def open_records(content: bytes) -> None:
    from phalanx.transport.encryption import RecordReader

    reader = RecordReader(bytes(32))

    def take() -> None:
        while reader.open():
            reader.take(memoryview(bytearray(1 << 16)))

    feed(reader, content, take)


def shake_hands(content: bytes) -> None:
    from phalanx.transport.handshake import Handshake, Role

    role = Role.DIALER if content[:1] < b"\x80" else Role.LISTENER
    handshake, rest = Handshake(role, b"0123456789abcdef"), content[1:]
    while not handshake.done and rest:
        handshake.data_to_send()
        count = min(handshake.bytes_needed(), len(rest))
        handshake.receive_data(rest[:count])
        rest = rest[count:]


def read_checkpoint(content: bytes) -> None:
    """Both a file of these bytes, and one whose state they are behind a right seal."""
    from phalanx.checkpoint import checkpoint_directory as checkpoints

    digest = checkpoints.hashlib.sha256(content).digest()
    sealed = content + digest + len(content).to_bytes(8, "big") + checkpoints._SEAL
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
        for body in (content, sealed):
            file.seek(0)
            file.truncate()
            file.write(body)
            file.flush()
            try:
                checkpoints.read(Path(file.name))
            except checkpoints.DamagedCheckpointError:
                continue


def read_snapshot(content: bytes) -> None:
    from phalanx.parameter_server.server import snapshots

    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
        file.write(content)
        file.flush()
        snapshots._read(Path(file.name))


def snapshot_seeds() -> Seeds:
    from phalanx.parameter_server.server.snapshots import Snapshots

    with tempfile.TemporaryDirectory() as folder:
        Snapshots((Path(folder, "a"), Path(folder, "b"))).write(b"header", [np.ones(2, np.float32)])
        return [Path(folder, "b").read_bytes()]


def ledger(content: bytes) -> None:
    from phalanx.data.sample_ledger import SampleLedger

    SampleLedger(10).load(content)


def targets() -> dict[str, Target]:
    """All decoders, by name."""
    import logging

    from phalanx.collectives.host.mesh import AbortNotice, CollectiveDescription
    from phalanx.compression import codec
    from phalanx.coordinator import accepted_workers, chief_session
    from phalanx.data.sample_ledger import SampleLedger
    from phalanx.elastic import coordinator_client, coordinator_server, membership_messages
    from phalanx.errors import FrameError, HandshakeError
    from phalanx.horovod import negotiator
    from phalanx.launcher.host_messages import Answer, Command
    from phalanx.parameter_server import client, lease_grants
    from phalanx.parameter_server.server import (
        group_leadership,
        group_recovery,
        replication,
        request_handler,
        snapshots,
    )
    from phalanx.parameter_server.server_messages import arrays_of
    from phalanx.runtime.crash_report import CrashReport
    from phalanx.runtime.write_claim import Owner
    from phalanx.transport import frames, serialization
    from phalanx.transport.handshake import Hello, Welcome

    logging.getLogger(snapshots.__name__).setLevel(logging.ERROR)  # a warning for each damaged one
    damaged = (msgspec.MsgspecError, UnicodeError, RecursionError)

    def plain(decode: Callable[[bytes], Any], *seeds: bytes) -> Target:
        return Target(decode, damaged, list(seeds))

    def of_type(kind: Any) -> Target:
        return plain(msgspec.msgpack.Decoder(kind).decode)

    def members(decoder: Any) -> Target:
        return plain(lambda content: membership_messages.unpack(decoder, content[4:], [memoryview(content[:4])]))

    def arrays(content: bytes) -> None:
        dtype, _, data = content.partition(b"|")
        arrays_of([memoryview(data)], [dtype.decode("latin-1")])

    mixed = {"a": [1, 2.5, None, "b"], "c": np.arange(6, dtype=np.float32).reshape(2, 3), "d": (1,)}
    values = serialization.encode(mixed)
    packed = codec._packed([[np.ones(3, np.float32)], [np.zeros((2, 2), np.int8)]]).tobytes()
    sample_ledger = SampleLedger(10)
    sample_ledger.end_epoch(0)
    return {
        "frames": Target(read_frames, (FrameError,), [b"".join(frames.encode_frame(b"header", [b"12", b"345"]))]),
        "records": Target(open_records, (FrameError,), [b"\0\0\0\x20" + bytes(32)]),
        "handshake": Target(shake_hands, (HandshakeError,), [b"\0PHX" + bytes(200), b"\xffPHX" + bytes(200)]),
        "hello": of_type(Hello),
        "welcome": of_type(Welcome),
        "values": Target(serialization.decode, (FrameError,), [values]),
        "elastic member": members(coordinator_client._decoder),
        "elastic coordinator": members(coordinator_server._decoder),
        "server requests": plain(request_handler._REQUESTS.decode),
        "server responses": plain(client._RESPONSES.decode),
        "server leases": plain(lease_grants._REQUESTS.decode),
        "server records": plain(replication._RECORDS.decode),
        "server states": plain(group_recovery._STATES.decode),
        "leader offers": of_type(group_leadership.LeaderOffer),
        "server arrays": Target(arrays, (FrameError,), [b"float32|12345678", b"O|12345678"]),
        "collectives": of_type(CollectiveDescription),
        "abort notices": of_type(AbortNotice),
        "compressed gradients": Target(lambda c: codec._unpacked(np.frombuffer(c, np.uint8)), (FrameError,), [packed]),
        "horovod requests": plain(negotiator._DECODER.decode),
        "function answers": plain(accepted_workers._ANSWERS.decode),
        "function orders": plain(chief_session._ORDERS.decode),
        "agent commands": plain(msgspec.json.Decoder(Command).decode, b'{"type":"prepare","workers":1}'),
        "agent answers": plain(msgspec.json.Decoder(Answer).decode, b'{"type":"prepared","ports":[1]}'),
        "crash reports": plain(msgspec.json.Decoder(CrashReport).decode, b"{}"),
        "claims": plain(msgspec.json.Decoder(Owner).decode, b'{"run":"a","attempt":0}'),
        "ledgers": Target(ledger, (FrameError,), [sample_ledger.encoded()]),
        "checkpoints": Target(read_checkpoint, (), [json.dumps({"step": 5, "fit": "AA=="}).encode()]),
        "snapshots": Target(read_snapshot, (), snapshot_seeds()),
    }


class Checked:
    """Runs a target on inputs, and counts them."""

    def __init__(self, name: str, target: Target) -> None:
        self._name, self._target = name, target
        self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.count = 0

    def __call__(self, content: bytes) -> None:
        self.count += 1
        started_at, before = time.monotonic(), self._peak
        try:
            self._target.decode(content)
        except self._target.errors:
            pass
        except BaseException as error:
            error.add_note(f"{self._name}: {content!r}")
            raise
        self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert (self._peak - before) * 1024 < MAX_BYTES, f"{self._name} takes too much memory: {content!r}"
        assert time.monotonic() - started_at < SLOW_S, f"{self._name} takes too long: {content!r}"


def mutations(seeds: Seeds, chance: random.Random) -> Iterator[bytes]:
    """Inputs without end: the seeds with bytes changed, removed, repeated and joined, and random ones."""
    lengths = [b"\xff" * 4, b"\x7f" * 8, b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"]
    interesting = [b"", b"\0", b"\xc1", b"O", *lengths]
    pool = [*seeds, b""]
    yield from pool
    while True:
        content = bytearray(chance.choice(pool) if chance.random() < 0.8 else chance.randbytes(chance.randrange(64)))
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(content) + 1)
            until = min(len(content), at + chance.randrange(8))
            piece = chance.choice(
                [chance.randbytes(chance.randrange(5)), chance.choice(interesting), bytes(content[at:until]) * 2]
            )
            content[at:until] = piece
        result = bytes(content[:MAX_INPUT_BYTES])
        if chance.random() < 0.01:
            pool[chance.randrange(len(seeds) + 1) :] = [*pool[len(seeds) :][-63:], result]
        yield result


def fuzz_by_mutation(check: Checked, seeds: Seeds, seconds: float) -> None:
    """Until the time is over."""
    until = time.monotonic() + seconds
    for content in mutations(seeds, random.Random(check._name)):
        check(content)
        if check.count % 64 == 0 and time.monotonic() > until:
            return


def fuzz_by_coverage(check: Checked, seeds: Seeds, seconds: float) -> None:
    """As `fuzz_by_mutation`; ends the process, as libFuzzer does."""
    import atheris

    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds):
            Path(folder, str(number)).write_bytes(seed)
        options = [f"-max_total_time={int(seconds)}", f"-max_len={MAX_INPUT_BYTES}", f"-timeout={SLOW_S}"]
        atheris.Setup(["fuzz", *options, f"-artifact_prefix={folder}/", folder], check)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for all decoders together")
    parser.add_argument("--decoder", action="append", help="only this one; may be repeated")
    parser.add_argument("--coverage", action="store_true", help="let atheris choose the inputs; one --decoder only")
    arguments = parser.parse_args()
    instrumented: AbstractContextManager[Any] = nullcontext()
    if arguments.coverage:
        import atheris

        instrumented = atheris.instrument_imports(include=["phalanx"])
    with instrumented:
        known = targets()
    names = arguments.decoder or list(known)
    seconds = arguments.minutes * 60 / len(names)
    if arguments.coverage and len(names) > 1:  # libFuzzer ends its process
        own = [sys.executable, "-m", "tests.security.fuzz", "--coverage", "--minutes", str(seconds / 60), "--decoder"]
        return max(subprocess.run([*own, name], check=False).returncode for name in names)
    for name in names:
        check = Checked(name, known[name])
        if arguments.coverage:
            fuzz_by_coverage(check, known[name].seeds, seconds)
        fuzz_by_mutation(check, known[name].seeds, seconds)
        print(f"{name}: {check.count} inputs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
