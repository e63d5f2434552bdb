"""Feeds forged bytes to every decoder that reads what another process or a file says.

    python -m tests.security.fuzz --minutes 10 [--decoder NAME ...]

A decoder returns a value or raises one of its own errors. Any other error, an input that takes longer than 10 s, or one
that takes more than 64 MB fails. Inputs are mutations of valid ones; in `coverage_fuzz`, atheris chooses them. The
number of inputs is printed for each decoder.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import logging
import random
import resource
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

import phalanx
from phalanx.collectives.host.channel import PacketKind
from phalanx.errors import ConfigurationError, FrameError, HandshakeError, LinkClosedError
from phalanx.monitoring.job_view import JobView
from phalanx.monitoring.worker_figures import WorkerFigures
from phalanx.transport.decoding import Decoder, decode_message
from tests.security.example_messages import examples

MAX_BYTES = 64 * 2**20
"""What a refused message may take, beyond what the process has taken before."""
MAX_INPUT_BYTES = 4096
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
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
    with tempfile.NamedTemporaryFile(dir=MEMORY) as file:
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

    with tempfile.NamedTemporaryFile(dir=MEMORY) as file:
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


def decoder_sites() -> dict[str, tuple[Any, bool]]:
    """The type of every message that a module of Phalanx reads, and whether it is JSON, by module and name.

    They are found in the source, so that no decoder is forgotten. A type that is a parameter is missing: its callers
    have their own tests.
    """
    found: dict[str, tuple[Any, bool]] = {}
    for path in sorted(Path(phalanx.__file__).parent.rglob("*.py")):
        source = path.read_text()
        if path.stem == "decoding" or "phalanx.transport.decoding" not in source:
            continue
        name = ".".join(path.relative_to(Path(phalanx.__file__).parent.parent).with_suffix("").parts)
        for kind, is_json in _sites(ast.parse(source)):
            with suppress(NameError):  # of a parameter
                value = eval(kind, vars(importlib.import_module(name)))
                found[f"{path.stem}: {kind}"] = value, is_json
    return found


def _sites(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            of_json = node.func.id == "decode_json" or any(each.arg == "json" for each in node.keywords)
            if node.func.id == "Decoder":
                yield ast.unparse(node.args[0]), of_json
            elif node.func.id in ("decode_message", "decode_json"):
                yield ast.unparse(node.args[1]) if len(node.args) > 1 else "object", of_json


def message_targets() -> dict[str, Target]:
    """Decoders of messages, with valid ones of every kind as seeds."""
    found = {}
    for name, (kind, is_json) in decoder_sites().items():
        codec: Any = msgspec.json if is_json else msgspec.msgpack
        seeds = [codec.encode(each) for each in ([{"a": [1]}] if kind is object else examples(kind))]
        found[name] = Target(Decoder(Any if kind is object else kind, json=is_json).decode, (FrameError,), seeds)
    return found


def packets(content: bytes) -> None:
    """What a channel makes of bytes that arrive on its link."""
    from phalanx.collectives.host.channel import Channel
    from phalanx.transport.link import Link

    one, other = socket.socketpair()
    with one:
        other.sendall(content)
        other.close()
        link = Link(one, "worker/1")
        channel = Channel(link)
        with suppress(LinkClosedError):
            while header := channel.header():
                if header.kind is PacketKind.DATA:
                    channel.discard()
                    channel.next()
                elif channel.message() is not None:
                    channel.next()


def codes(content: bytes) -> None:
    """What each codec makes of the parts that another rank has sent."""
    from phalanx.compression.codec import _unpacked
    from phalanx.compression.quantized import Int4, Int6, Int8
    from phalanx.compression.top_k import TopK

    for parts in _unpacked(np.frombuffer(content, np.uint8)):
        for each in (Int8(), Int6(), Int4(), TopK(), TopK(values=None)):
            with suppress(FrameError, ConfigurationError):
                each._decode(parts, np.zeros(4, np.float32))


def events(content: bytes) -> None:
    """What `phalanx status` and the dashboard make of the events of a job."""
    from phalanx.dashboard import browser_view, prometheus_metrics
    from phalanx.launcher.watching.job_follower import read_view
    from phalanx.monitoring.job_events import EVENTS_FILE

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        Path(folder, EVENTS_FILE).write_bytes(content)
        view = read_view(Path(folder))
    browser_view.message(view, None, control=False)
    prometheus_metrics.expose([view])


def event_seeds() -> Seeds:
    from phalanx.monitoring.job_events import JobEvent

    each = [msgspec.json.encode(event) + b"\n" for event in examples(JobEvent)]
    return [b"".join(each), *each]


def progress_page(content: bytes) -> None:
    """What a launcher makes of the page that it shares with a worker."""
    from phalanx.runtime import progress

    page = content.ljust(progress.RECORD_BYTES, b"\0")
    progress.parse(page)
    progress.parse_saves_checkpoint(page)
    if found := progress.parse_figures(page):
        with suppress(FrameError):
            decode_message(found[1], WorkerFigures)


def packet_seeds() -> Seeds:
    from phalanx.collectives.host.channel import _HEADER, _MAGIC

    return [_HEADER.pack(_MAGIC, kind, 1, 1, 1, 4) + b"1234" for kind in PacketKind]


def arrays(content: bytes) -> None:
    from phalanx.parameter_server.server_messages import arrays_of

    dtype, _, data = content.partition(b"|")
    arrays_of([memoryview(data)], [dtype.decode("latin-1")])


def cluster(content: bytes) -> None:
    from phalanx.cluster.resolvers.tf_config import load_tf_config, read_cluster, read_task

    config = load_tf_config(content.decode("latin-1"))
    read_cluster(config)
    read_task(config)


def plan(content: bytes) -> None:
    from phalanx.config.plan_request import PlanRequest

    PlanRequest.from_text(content.decode("latin-1"))


def control_answers(content: bytes) -> None:
    """What a launcher answers to any line on its socket."""
    from phalanx.launcher.watching.job_control import JobControl

    control = object.__new__(JobControl)
    control._recorder, control.job = (
        SimpleNamespace(  # type: ignore[assignment]
            changes=lambda after: (1, []),
            output_of=lambda task: "",
            numbered_view=lambda: (1, JobView()),
            view=JobView(),
        ),
        None,
    )
    control._followers, control._answered = {}, threading.Condition()
    control._answer(content, 1)


def special_targets() -> dict[str, Target]:
    """Decoders of other bytes than messages."""
    from phalanx.compression import codec
    from phalanx.data.sample_ledger import SampleLedger
    from phalanx.launcher.watching.job_connection import ControlRequest
    from phalanx.transport import frames, serialization

    mixed = {"a": [1, 2.5, None, "b"], "c": np.arange(6, dtype=np.float32).reshape(2, 3), "d": (1,)}
    values = serialization.encode(mixed)
    packed = codec._packed([[np.ones(3, np.float32)], [np.zeros((2, 2), np.int8)]]).tobytes()
    quantized = codec._packed([[np.ones(256, np.uint8), np.ones(1, np.float32)]]).tobytes()
    sample_ledger = SampleLedger(10)
    sample_ledger.end_epoch(0)
    tf_config = b'{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}'
    requests = [msgspec.json.encode(each) for each in examples(ControlRequest)]
    actions = [b'{"action": "output", "task": "worker/1"}', b'{"action": "scale", "workers": 3}']
    return {
        "frames": Target(read_frames, (FrameError,), [b"".join(frames.encode_frame(b"header", [b"12", b"345"]))]),
        "records": Target(open_records, (FrameError,), [b"\0\0\0\x20" + bytes(32)]),
        "handshake": Target(shake_hands, (HandshakeError,), [b"\0PHX" + bytes(200), b"\xffPHX" + bytes(200)]),
        "packets": Target(packets, (FrameError,), packet_seeds()),
        "values": Target(serialization.decode, (FrameError,), [values]),
        "server arrays": Target(arrays, (FrameError,), [b"float32|12345678", b"O|12345678"]),
        "compressed gradients": Target(codes, (FrameError,), [packed, quantized]),
        "ledgers": Target(ledger, (FrameError,), [sample_ledger.encoded()]),
        "checkpoints": Target(read_checkpoint, (), [json.dumps({"step": 5, "fit": "AA=="}).encode()]),
        "snapshots": Target(read_snapshot, (), snapshot_seeds()),
        "events": Target(events, (ConfigurationError,), event_seeds()),
        "progress pages": Target(progress_page, (), [progress_seed()]),
        "control requests": Target(control_answers, (), [*requests, *actions]),
        "TF_CONFIG": Target(cluster, (ConfigurationError,), [tf_config]),
        "plan requests": Target(plan, (ConfigurationError,), [b'{"result": "a", "replicas": 2, "topology": ""}']),
    }


def progress_seed() -> bytes:
    from phalanx.runtime import progress

    return progress.blank()


def targets() -> dict[str, Target]:
    """All decoders, by name."""
    logging.getLogger("phalanx.parameter_server.server.snapshots").setLevel(logging.ERROR)  # warns of each damaged one
    return {**special_targets(), **message_targets()}


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _reset_peak() -> int:
    """Forget what was taken so far, such as by imports, under which much would go unnoticed; the present KiB.

    Source: proc(5), /proc/PID/clear_refs.
    """
    with suppress(OSError):  # another system than Linux
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_kib()


class Checked:
    """Runs a target on inputs, and counts them."""

    def __init__(self, name: str, target: Target) -> None:
        self._name, self._target = name, target
        self._peak = self._before = _reset_peak()
        self.count = 0

    def __call__(self, content: bytes) -> None:
        self.count += 1
        started_at = time.monotonic()
        try:
            self._target.decode(content)
        except self._target.errors:
            pass
        except BaseException as error:
            error.add_note(f"{self._name}: {content!r}")
            raise
        if (peak := _peak_kib()) > self._peak:
            taken, self._peak = peak - self._before, peak
            assert taken * 1024 < MAX_BYTES, f"{self._name} takes too much memory: {content!r}"
            self._peak = self._before = _reset_peak()
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


def main(fuzz: Callable[[Checked, Seeds, float], None]) -> int:
    """Run the program whose options `--help` shows, with one of the two ways to choose inputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for all decoders together")
    parser.add_argument("--decoder", action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()
    known = targets()
    names = arguments.decoder or list(known)
    seconds = arguments.minutes * 60 / len(names)
    failed = []
    for name in names:
        check = Checked(name, known[name])
        try:
            fuzz(check, known[name].seeds, seconds)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {check.count} inputs{', FAILED' if name in failed else ''}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(fuzz_by_mutation))
