"""The file is a trace that can be read at any time, even while several processes write to it or are killed."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ConfigurationError
from phalanx.monitoring import timeline
from tests.support.traces import check_nesting, named, names_of_processes, names_of_tracks, read

BOUND_S = 30.0


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    timeline.stop()


def begin(path: Path, rank: int = 0) -> timeline.TimelineRecorder:
    timeline.start(timeline.TimelineSinkRecorder(timeline.TimelineFileSink(path, "job"), rank, f"worker/{rank}"))
    return timeline.current


def test_what_is_recorded_is_a_trace_with_named_processes_and_tracks(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timeline.create(path, "job")
    recorder = begin(path, 3)
    recorder.enter("data")
    recorder.enter("forward/backward", step=7)
    with recorder.span(timeline.COLLECTIVES, "all_reduce", {"bytes": 8, "algorithm": "ring"}):
        recorder.complete(timeline.COLLECTIVES, "wait", timeline.now(), {"for": 1})
    recorder.leave()
    recorder.leave()
    recorder.instant(timeline.MEMBERSHIP, 'a name with "quotes" and\nlines')
    parts = [timeline.TimelinePart("NEGOTIATE_ALLREDUCE", 2000), timeline.TimelinePart("ALLREDUCE", 3000, {"bytes": 8})]
    recorder.across("tensor", 1000, parts)
    timeline.stop()

    events = read(path)
    assert names_of_processes(events) == {3: "worker/3"}
    tracks = names_of_tracks(events)
    assert [tracks[3, event["tid"]] for event in named(events, "data")] == ["training"]
    (step,) = named(events, "forward/backward")
    assert step["args"] == {"step": 7}
    assert named(events, "data")[0]["ts"] + named(events, "data")[0]["dur"] == pytest.approx(step["ts"])
    (reduce,), (wait,) = named(events, "all_reduce"), named(events, "wait")
    assert reduce["args"] == {"bytes": 8, "algorithm": "ring"}
    assert tracks[3, reduce["tid"]] == tracks[3, wait["tid"]] == "collectives"
    assert reduce["ts"] <= wait["ts"] <= reduce["ts"] + reduce["dur"]
    assert len(named(events, 'a name with "quotes" and\nlines')) == 1
    line = [(event["ph"], event["name"], event["ts"]) for event in events if event.get("id") == "3 tensor"]
    assert line == [
        ("b", "tensor", 1.0),
        ("b", "NEGOTIATE_ALLREDUCE", 1.0),
        ("e", "NEGOTIATE_ALLREDUCE", 2.0),
        ("b", "ALLREDUCE", 2.0),
        ("e", "ALLREDUCE", 3.0),
        ("e", "tensor", 3.0),
    ]


def test_overlapping_events_of_one_track_would_be_found() -> None:
    def event(start: float, length: float) -> dict[str, object]:
        return {"name": "x", "ph": "X", "pid": 0, "tid": 1, "ts": start, "dur": length}

    check_nesting([event(0, 10), event(2, 3), event(5, 5), event(10, 1)])
    with pytest.raises(AssertionError):
        check_nesting([event(0, 10), event(5, 6)])


def test_nothing_is_recorded_unless_it_was_started_and_then_once() -> None:
    assert not timeline.current.on
    timeline.current.enter("data", step=1)
    timeline.current.leave()
    timeline.current.complete("training", "x", timeline.now())
    timeline.stop()


def test_starting_twice_is_an_error(tmp_path: Path) -> None:
    timeline.create(tmp_path / "t.json", "job")
    begin(tmp_path / "t.json")
    with pytest.raises(ValueError, match="started already"):
        begin(tmp_path / "t.json")


def test_several_processes_write_to_one_file_and_of_a_killed_one_the_beginning_is_there(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timeline.create(path, "job")
    context = multiprocessing.get_context("fork")
    ready = [context.Event() for _ in range(3)]

    def rank(number: int) -> None:
        recorder = begin(path, number)
        for step in range(500):
            recorder.complete(timeline.TRAINING, "step", timeline.now(), {"step": step})
        recorder._flush()  # type: ignore[attr-defined]
        ready[number].set()
        if number == 1:
            threading.Event().wait(BOUND_S)
        timeline.stop()

    processes = [context.Process(target=rank, args=(number,), daemon=True) for number in range(3)]
    for process in processes:
        process.start()
    for each in ready:
        assert each.wait(BOUND_S)
    os.kill(processes[1].pid, signal.SIGKILL)
    for process in processes:
        process.join(BOUND_S)
    events = read(path)
    assert {rank: len(named(events, "step", rank)) for rank in range(3)} == {0: 500, 1: 500, 2: 500}
    assert names_of_processes(events) == {rank: f"worker/{rank}" for rank in range(3)}


@pytest.mark.parametrize("torn", [b"\n]", b',\n{"name":"half', b',\n{"name":"a","args":{"b":1}', b"\n]\n,\n{"])
def test_a_torn_end_is_mended_by_the_next_who_writes(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "t.json"
    timeline.create(path, "job")
    sink = timeline.TimelineFileSink(path, "job")
    assert sink.write([b'{"name":"one","ph":"M"}', b'{"name":"two","ph":"M"}'])
    whole = path.read_bytes()
    path.write_bytes(whole.removesuffix(b"\n]\n") + torn)
    assert sink.write([b'{"name":"three","ph":"M"}'])
    assert [event["name"] for event in json.loads(path.read_text())][-2:] == ["two", "three"]


def test_a_process_that_is_stopped_while_it_writes_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "LOCK_S", 0.05)
    timeline.create(path := tmp_path / "t.json", "job")
    sink = timeline.TimelineFileSink(path, "job")
    with open(path, "r+b") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert not sink.write([b'{"name":"event"}'])
    assert sink.write([b'{"name":"event"}'])
    assert json.loads(path.read_text())[-1]["name"] == "event"


def test_events_wait_for_the_file_of_their_job(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    sink = timeline.TimelineFileSink(path, "mine")
    assert not sink.write([b"{}"])
    timeline.create(path, "former")
    assert not sink.write([b"{}"])
    timeline.create(path, "mine")
    assert sink.write([b'{"name":"event"}'])
    timeline.create(path, "mine")  # a chief that was started again
    assert [event["name"] for event in json.loads(path.read_text())] == ["phalanx", "event"]
    timeline.create(path, "mine", overwrite=True)
    assert len(json.loads(path.read_text())) == 1


class Interrupted(timeline.TimelineSinkRecorder):
    """Is flushed while another thread adds an event."""

    is_flushed_next = False

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "_waiting" and self.is_flushed_next:
            self.is_flushed_next = False
            self._flush()
        return value


def test_an_event_that_is_added_during_a_flush_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timeline.create(path, "job")
    recorder = Interrupted(timeline.TimelineFileSink(path, "job"), 0, "worker/0")

    class Counted(list[Any]):
        def __len__(self) -> int:
            recorder.is_flushed_next = True  # at the next look at the list, which is for the append
            return super().__len__()

    recorder._waiting = Counted(recorder._waiting)
    recorder.instant(timeline.TRAINING, "joined")
    recorder._flush()
    recorder._flush()
    assert len(named(read(path), "joined")) == 1


def test_a_file_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        timeline.create(tmp_path / "no such folder" / "t.json", "job")
    assert list(tmp_path.iterdir()) == []
