"""Reads timelines, and checks the rules that all of them must follow."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Events = list[dict[str, Any]]

ROUNDING_US = 0.01
"""Times are nanoseconds written as microseconds in floating point."""


def read(path: Path) -> Events:
    """Return the events of a file after checking that they conform to the format."""
    events: Events = json.loads(path.read_text())
    for event in events:
        assert event["ph"] in "XiMbe", event
        assert isinstance(event["name"], str)
        assert {"pid", "tid", "ts"} <= event.keys() or event["ph"] == "M", event
        assert ("dur" in event) == (event["ph"] == "X"), event
        assert event.get("dur", 0) >= 0, event
        assert ("id" in event) == (event["ph"] in "be"), event
    check_nesting(events)
    return events


@contextlib.contextmanager
def traced(hvd: Any, events: Events, *, mark_cycles: bool = False) -> Iterator[None]:
    """Context manager that fills `events` with the timeline of its body. All ranks must call this."""
    (path,) = hvd.broadcast_object([tempfile.mktemp(suffix=".json")], 0)
    hvd.start_timeline(path, mark_cycles=mark_cycles)
    try:
        yield
    finally:
        hvd.stop_timeline()
    # Barriers have no names, and earlier cases may have called fewer of them on some ranks.
    hvd.allgather_object(None, name="all have stopped")
    events += read(Path(path))
    hvd.allgather_object(None, name="all have read")
    if hvd.rank() == 0:
        os.unlink(path)


def check_nesting(events: Sequence[dict[str, Any]]) -> None:
    """Check that events of one track follow each other or are nested."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event))
    for found in tracks.values():
        open_until: list[tuple[float, dict[str, Any]]] = []
        for start, minus_duration, event in sorted(found, key=lambda each: each[:2]):
            while open_until and open_until[-1][0] <= start + ROUNDING_US:
                open_until.pop()
            end = start - minus_duration
            assert not open_until or end <= open_until[-1][0] + ROUNDING_US, (event, open_until[-1][1])
            open_until.append((end, event))


def named(events: Events, name: str, rank: int | None = None) -> Events:
    """Events with a name, of one rank or of all ranks."""
    return [event for event in events if event["name"] == name and rank in (None, event["pid"])]


def names_of_processes(events: Events) -> dict[int, str]:
    """Name of each rank."""
    return {event["pid"]: event["args"]["name"] for event in named(events, "process_name")}


def names_of_tracks(events: Events) -> dict[tuple[int, int], str]:
    """Name of each track of each rank."""
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named(events, "thread_name")}
