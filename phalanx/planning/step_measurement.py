"""What one replica's step computes and merges, as the examined program writes it and `phalanx plan` reads it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from phalanx.collectives.host.recording_algorithm import RecordedCall


class StepMeasurement(msgspec.Struct, frozen=True):
    """The steps of one replica among `replicas`.

    Attributes:
        replicas: how many replicas the program believed in.
        local_batch, global_batch: samples of a step, of this replica and of all.
        computed_s: seconds of a step without its collectives, the median.
        steps: how many steps that is the median of.
        cycle: number of steps after which the collectives repeat.
        collectives: those of one cycle.
        overlaps: whether collectives run during the steps that follow.
        weights: number of trainable weights.
        backend: of Keras.
    """

    replicas: int
    local_batch: int
    global_batch: int
    computed_s: float
    steps: int
    cycle: int
    collectives: tuple[RecordedCall, ...]
    overlaps: bool
    weights: int
    backend: str

    @property
    def merged_bytes(self) -> float:
        """Bytes that one rank contributes in a step, on average."""
        return sum(record.nbytes for record in self.collectives) / self.cycle


def write_result(path: Path, result: msgspec.Struct) -> None:
    """Write a file that appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.encode(result))
    os.replace(part, path)
