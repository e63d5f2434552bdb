"""The report about a step that was compiled for a topology."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phalanx.planning.accelerators import DeviceTopology
from phalanx.planning.hlo_collectives import HloCollective
from phalanx.planning.program_measurement import ProgramMeasurement
from phalanx.planning.scaling_report import byte_count, milliseconds, render_rows


class Bound(NamedTuple):
    """A lower bound on the time of a step."""

    what: str
    seconds: float
    reason: str


def bounds(measurement: ProgramMeasurement, topology: DeviceTopology) -> list[Bound]:
    """Lower bounds on the time of a step on these devices, longest first. Bounds that the compiler does not report are
    left out. Empty for CPUs, because their figures vary too much."""
    device = topology.accelerator
    if device is None:
        return []
    sent = sum(collective.sent_bytes for collective in measurement.collectives)
    links = "NVLink" if device.gpu else "one port in each direction"
    found = [
        Bound(
            "compute",
            measurement.flops / device.flops,
            f"{count(measurement.flops)}FLOP at {count(device.flops)}FLOP/s",
        ),
        Bound(
            "memory",
            measurement.accessed_bytes / device.memory_bytes_per_s,
            f"{byte_count(measurement.accessed_bytes)} at {byte_count(device.memory_bytes_per_s)}/s",
        ),
        Bound(
            "interconnect",
            sent / device.port_bytes_per_s,
            f"{byte_count(sent)} at {byte_count(device.port_bytes_per_s)}/s, {links}",
        ),
    ]
    known = [bound for bound in found if bound.seconds or bound.what == "interconnect"]
    return sorted(known, key=lambda bound: -bound.seconds)


def fits(measurement: ProgramMeasurement, topology: DeviceTopology) -> bool | None:
    """Whether a step fits into the memory of a device; None if unknown."""
    if measurement.refusal:
        return False
    device = topology.accelerator
    return None if device is None else measurement.needed_bytes <= device.memory_bytes


def render(measurement: ProgramMeasurement, topology: DeviceTopology) -> str:
    """Render the report of `phalanx plan --topology`."""
    return "\n".join(_lines(measurement, topology))


def _lines(measurement: ProgramMeasurement, topology: DeviceTopology) -> Iterator[str]:
    yield (
        f"{measurement.weights:,} weights and {measurement.global_batch:,} samples per step, on {topology.devices} "
        f"devices {measurement.mesh}."
    )
    yield f"Compiled for {topology.name}, not run. All figures are of one device."
    yield ""
    if measurement.refusal:
        yield f"It does not fit. The compiler says: {measurement.refusal}"
        return
    yield from _memory_lines(measurement, topology)
    yield ""
    yield from _collective_lines(measurement.collectives)
    found = bounds(measurement, topology)
    if found:
        yield ""
        yield "A step takes at least"
        yield render_rows([(f"  {each.what}", milliseconds(each.seconds), each.reason) for each in found], "<><")
        yield f"Limited by: {found[0].what}."
    if measurement.host_calls:
        yield ""
        calls = ", ".join(sorted(set(measurement.host_calls)))
        yield f"In every step the devices wait for the host: {calls}. Remove callbacks and prints from the model."


def _memory_lines(measurement: ProgramMeasurement, topology: DeviceTopology) -> Iterator[str]:
    parts = (
        ("arguments", measurement.argument_bytes, "weights, optimizer, metrics and the batch"),
        ("outputs", measurement.output_bytes - measurement.alias_bytes, "those that do not replace arguments"),
        ("temporaries", measurement.temporary_bytes, "activations and gradients, at their peak"),
        ("program", measurement.code_bytes, ""),
        ("total", measurement.needed_bytes, _verdict(measurement, topology)),
    )
    yield "Memory"
    yield render_rows([(f"  {name}", byte_count(nbytes), note) for name, nbytes, note in parts], "<><")


def _verdict(measurement: ProgramMeasurement, topology: DeviceTopology) -> str:
    device = topology.accelerator
    if device is None:
        return ""
    verdict = "it fits" if fits(measurement, topology) else "it does not fit"
    return f"of {byte_count(device.memory_bytes)}: {verdict}"


def _collective_lines(collectives: Sequence[HloCollective]) -> Iterator[str]:
    """One line per kind, dtype and group of collectives, largest traffic first."""
    if not collectives:
        yield "No collectives: the devices exchange nothing."
        return
    groups: dict[tuple[str, str, int], list[HloCollective]] = {}
    for each in collectives:
        groups.setdefault((each.kind, each.dtype, each.group), []).append(each)
    rows = [("  collective", "times", "devices", "values", "bytes", "each device sends")]
    for (kind, dtype, size), found in sorted(groups.items(), key=lambda item: -_sent(item[1])):
        total = sum(each.count * each.nbytes for each in found)
        times = sum(each.count for each in found)
        rows.append((f"  {kind}", f"{times}", f"{size}", dtype, byte_count(total), byte_count(_sent(found))))
    yield render_rows(rows, "<>>>>>")


def _sent(collectives: Sequence[HloCollective]) -> float:
    return sum(each.sent_bytes for each in collectives)


def count(number: float) -> str:
    """Format a number such as `197 T`, to be followed by a unit."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000 or unit == "T":
            break
        number /= 1000
    return f"{number:.3g} {unit}"
