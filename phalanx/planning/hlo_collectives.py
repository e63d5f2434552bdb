"""Finds collectives and host calls in the text of a compiled XLA program. All functions are pure.

The text is a list of computations. One is the entry; others are loop bodies, fusions, or the parts of a collective that
the compiler has split to overlap it with arithmetic. Such parts repeat the collective with the same `channel_id`, so
each channel counts once. On TPUs a reduce-scatter is an all-reduce in a computation called
`all-reduce-scatter`. Sources: XLA's HLO text as `jax.stages.Compiled.as_text` prints it, and
https://openxla.org/xla/operation_semantics for the meaning of each operation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_COLLECTIVE = re.compile(rf"= (?P<type>.*?) (?:ragged-)?(?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_SHAPE = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[[^)]*\)(?:\([^)]*\))*\))? \{([^}]*)\}")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_HOST = re.compile(
    r'custom_call_target="([^"]*(?:callback|host)[^"]*)"|\b(infeed|outfeed)\(|is_host_transfer=true', re.I
)


class HloCollective(msgspec.Struct, frozen=True):
    """A collective of a program.

    Attributes:
        kind: One of `KINDS`.
        dtype: XLA dtype, such as `bf16`.
        nbytes: Size of the whole value that is reduced or gathered, or that one device exchanges.
        group: Number of devices in a group.
        count: Number of times that the program runs it.
        origin: JAX name of the model's operation that causes it.
    """

    kind: str
    dtype: str
    nbytes: int
    group: int
    count: int = 1
    origin: str = ""

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in total with bandwidth-optimal algorithms (rings and direct exchange)."""
        share = (self.group - 1) / self.group
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0, "collective-broadcast": 1.0}.get(self.kind, share)
        return self.count * self.nbytes * factor


class _Line(NamedTuple):
    computation: str
    text: str


def find_collectives(text: str, devices: int) -> list[HloCollective]:
    """Return the collectives of a program in program order.

    Args:
        text: HLO text of the compiled program.
        devices: Number of devices that it is compiled for.
    """
    runs = _run_counts(text)
    channels: dict[str, HloCollective] = {}
    for number, line in enumerate(_lines(text)):
        match = _COLLECTIVE.search(line.text)
        if match is None:
            continue
        group = _group_size(line.text, devices)
        if group == 1:
            continue  # each device is its own group
        channel = _CHANNEL.search(line.text)
        key = channel[1] if channel else f"line {number}"
        collective = _collective(match, line, group, runs.get(line.computation, 1))
        known = channels.get(key)
        # Among the parts of one collective, a reduce-scatter takes precedence over its all-reduce (their names sort in
        # this order), and then the largest part.
        if known is None or (known.kind, known.nbytes) < (collective.kind, collective.nbytes):
            channels[key] = collective
    return list(channels.values())


def find_host_calls(text: str) -> list[str]:
    """Return the operations that make devices wait for the host in every step: callbacks, infeeds, transfers."""
    found = (match for line in text.splitlines() if (match := _HOST.search(line)))
    return [match[1] or match[2] or "host transfer" for match in found]


def _collective(match: re.Match[str], line: _Line, group: int, count: int) -> HloCollective:
    kind, start = match["kind"], match["start"] is not None
    shapes = list(_SHAPE.finditer(match["type"]))
    if start and kind in ("all-gather", "reduce-scatter"):
        shapes = shapes[len(shapes) // 2 :]  # operands, then results
    elif start and kind == "collective-permute":
        shapes = shapes[:1]  # operand, result, contexts
    nbytes = sum(map(_shape_bytes, shapes))
    if kind == "reduce-scatter":
        nbytes *= group
    if kind == "all-reduce" and line.computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    origin = _ORIGIN.search(line.text)
    dtype = f"{shapes[0][1]}{shapes[0][2]}" if shapes else ""
    return HloCollective(kind, dtype, nbytes, group, count, origin[1] if origin else "")


def _lines(text: str) -> Iterator[_Line]:
    computation = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            computation = header[1]
        else:
            yield _Line(computation, line)


def _run_counts(text: str) -> dict[str, int]:
    """Count the runs of each computation: one, except in loops with a known number of iterations."""
    calls = [
        (line.computation, called, int(trips[1]) if (trips := _TRIPS.search(line.text)) else 1)
        for line in _lines(text)
        for called in _CALLED.findall(line.text)
    ]
    runs: dict[str, int] = {}  # a computation with several callers has the highest count among them
    # In the text, a computation precedes its callers.
    for caller, called, trips in reversed(calls):
        runs[called] = max(runs.get(called, 1), runs.get(caller, 1) * trips)
    return runs


def _shape_bytes(shape: re.Match[str]) -> int:
    kind, bits, sizes = shape.groups()
    if not bits and kind != "pred":
        return 0  # a token
    count = math.prod(int(size) for size in sizes.split(",") if size)
    return -(-count * int(bits or 8) // 8)  # rounded up: int4 shares bytes; `pred` takes one


def _group_size(line: str, devices: int) -> int:
    """Number of devices per group. HLO writes groups as a list, a reshaped range, or axes of a mesh."""
    if listed := _LISTED_GROUPS.search(line):
        return len(listed[1].split(","))
    if iota := _IOTA_GROUPS.search(line):
        return int(iota[2])
    if mesh := _MESH_GROUPS.search(line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", mesh[2]))
    return devices  # without groups: all devices; the pairs of a permute need no groups
