"""Reads event files of TensorBoard."""

from __future__ import annotations

import struct
from pathlib import Path


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """All numbers in the event files of a folder, by name and step."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        position = 0
        while position < len(content):  # length, its sum, the event, its sum
            (length,) = struct.unpack_from("<Q", content, position)
            event = Event.FromString(content[position + 12 : position + 12 + length])
            position += 16 + length
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found
