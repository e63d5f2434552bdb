"""Computation and communication of one replica's step, as sent from the examined program to `phalanx plan`."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from phalanx.collectives.host.recording_algorithm import RecordedCall


class StepMeasurement(msgspec.Struct, frozen=True):
    """Measured steps of one replica among `replicas`.

    Attributes:
        replicas: Number of replicas in the simulated job.
        local_batch, global_batch: Samples per step, of this replica and of all replicas.
        computed_s: Median time of a step without its collectives.
        steps: Number of steps that were measured.
        cycle: Number of steps after which the collectives repeat.
        collectives: Collectives of one cycle.
        overlaps: Whether collectives run during the following steps.
        weights: Number of trainable weights.
        backend: Keras backend.
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
    """Write a result atomically."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.encode(result))
    os.replace(part, path)
