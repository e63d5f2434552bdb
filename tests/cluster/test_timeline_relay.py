"""Events of a rank on another host come to the file, on its host's clock."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster import timeline_relay
from phalanx.cluster.membership import Member, Membership
from phalanx.cluster.timeline_relay import TIMELINE, RemoteTimelineSink, TimelineRelay
from phalanx.errors import LinkClosedError
from phalanx.monitoring import timeline
from phalanx.transport.address import Address
from phalanx.transport.credentials import Credentials
from phalanx.transport.dial import RefusedError, dial
from phalanx.transport.handshake import Hello
from phalanx.transport.listener import Listener
from tests.cluster.conftest import wait_until
from tests.support.traces import named, read

BOUND_S = 20.0
SECRET = b"a secret for this test"


def remote(listener: Listener) -> RemoteTimelineSink:
    link, _ = dial(
        Address("127.0.0.1", listener.port),
        Hello(purpose=TIMELINE, task="worker/1", peer="worker/0"),
        credentials=Credentials(SECRET),
        deadline=time.monotonic() + BOUND_S,
    )
    return RemoteTimelineSink(link)


def test_another_host_measures_its_clock_and_sends_its_events(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timeline.create(path, "job")
    relay = TimelineRelay(timeline.TimelineFileSink(path, "job"))
    with Listener(
        [socket.create_server(("127.0.0.1", 0))], task="worker/0", credentials=Credentials(SECRET)
    ) as listener:
        listener.register(TIMELINE, relay)
        sink = remote(listener)
        offset, uncertain = sink.clock_offset()
        assert abs(offset) <= uncertain  # it is the same clock
        recorder = timeline.TimelineSinkRecorder(sink, 1, "worker/1", offset_ns=5_000_000_000)
        recorder.start()
        recorder.complete(timeline.TRAINING, "one\nline", 1000, {"text": "a\nb"})
        recorder.stop()
        relay.wait_until_idle(BOUND_S)
    (event,) = named(read(path), "one\nline", 1)
    assert event["ts"] == 5_000_001.0
    assert event["args"] == {"text": "a\nb"}


def test_events_that_cannot_be_written_yet_are_written_later(tmp_path: Path) -> None:
    class Locked:
        is_locked = True
        attempts = 0

        def write(self, events: Sequence[bytes]) -> bool:
            self.attempts += 1
            written.extend(() if self.is_locked else events)
            return not self.is_locked

        def close(self) -> None:
            pass

    written: list[bytes] = []
    file = Locked()
    relay = TimelineRelay(file)
    with Listener(
        [socket.create_server(("127.0.0.1", 0))], task="worker/0", credentials=Credentials(SECRET)
    ) as listener:
        listener.register(TIMELINE, relay)
        sink = remote(listener)
        sink.write([b"1", b"2"])
        wait_until(lambda: file.attempts)
        sink.write([b"3"])
        wait_until(lambda: file.attempts > 1)
        file.is_locked = False  # The next attempt is that at the end.
        sink.close()
        relay.wait_until_idle(BOUND_S)
    assert written == [b"1", b"2", b"3"]


def test_a_writer_that_is_gone_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Listener(
        [socket.create_server(("127.0.0.1", 0))], task="worker/0", credentials=Credentials(SECRET)
    ) as listener:
        arrived = threading.Event()

        class Refusing(TimelineRelay):
            def adopt(self, hello, link):
                link.close()
                arrived.set()

        listener.register(TIMELINE, Refusing(timeline.TimelineFileSink(tmp_path / "none", "job")))
        sink = remote(listener)
        assert arrived.wait(BOUND_S)
        with pytest.raises(LinkClosedError):
            sink.clock_offset()
        recorder = timeline.TimelineSinkRecorder(sink, 1, "worker/1")
        timeline.start(recorder)
        until = time.monotonic() + BOUND_S
        while timeline.current.on and time.monotonic() < until:
            timeline.current.instant(timeline.TRAINING, "event")
            time.sleep(0.01)
        assert not timeline.current.on
        recorder.stop()
    assert "the timeline of rank 1 cannot be written" in caplog.text


def test_a_timeline_that_has_ended_takes_no_events_of_the_next_one(tmp_path: Path) -> None:
    """Another host may begin with the next one before rank 0 does, and must wait for it."""
    with Listener(
        [socket.create_server(("127.0.0.1", 0))], task="worker/0", credentials=Credentials(SECRET)
    ) as listener:
        members = tuple(Member(rank, f"worker/{rank}", f"host{rank}", "", 1) for rank in range(2))
        identity = SimpleNamespace(config=SimpleNamespace(job_id="job"), tasks=[])
        node: Any = SimpleNamespace(membership=Membership(1, 0, members), identity=identity, listener=listener)
        timeline_relay.start_recording(node, tmp_path / "first.json")
        try:
            remote(listener).close()
        finally:
            timeline_relay.stop_recording()
        with pytest.raises(RefusedError, match="does not serve 'timeline', or not yet"):
            remote(listener)
