"""Predicts the step time for any number of machines from steps that were measured for a few. All pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.planning.collective_costs import CollectiveCosts, Machines
from phalanx.planning.step_measurement import StepMeasurement


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """Prediction of one training step of a job.

    Attributes:
        machines: Machines of the job.
        global_batch, local_batch: Samples of all replicas, and of the replica with the most.
        computed_s: Compute time of a replica.
        merged_s: Time that collectives add to it.
    """

    machines: Machines
    global_batch: float
    local_batch: int
    computed_s: float
    merged_s: float

    @property
    def step_s(self) -> float:
        return self.computed_s + self.merged_s

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.step_s


class ScalingModel:
    """Predicts the time of a step.

    Interpolates the global batch between two measured numbers of replicas, because a program may keep its `batch_size`
    constant or scale it with the number of replicas. Interpolates the compute time of a replica by its local batch.

    Args:
        measurements: Measurements with different numbers of replicas; at least one.
        costs: Costs of collectives.
    """

    def __init__(self, measurements: Sequence[StepMeasurement], costs: CollectiveCosts) -> None:
        self._measurements = sorted(measurements, key=lambda measurement: measurement.replicas)
        self._costs = costs
        self._batches = [(float(each.replicas), float(each.global_batch)) for each in self._measurements]
        by_size: dict[int, list[float]] = {}
        for each in self._measurements:
            by_size.setdefault(each.local_batch, []).append(each.computed_s)
        self._times = sorted((float(size), sum(times) / len(times)) for size, times in by_size.items())

    def predict(self, machines: Machines) -> StepPrediction:
        """Predict a step on these machines."""
        global_batch = interpolate(self._batches, machines.replicas)
        # The replica with the most samples decides. 1e-9 absorbs rounding errors of the interpolation.
        local_batch = max(1, math.ceil(global_batch / machines.replicas - 1e-9))
        computed_s = max(interpolate(self._times, local_batch), 1e-9)
        # Calls cannot be interpolated. Their duration is computed for these machines.
        nearest = min(self._measurements, key=lambda each: abs(math.log(each.replicas / machines.replicas)))
        merged_s = sum(self._costs.seconds(call, machines) for call in nearest.collectives) / nearest.cycle
        if nearest.overlaps:  # the exchange runs during the steps of a period
            merged_s = max(0.0, merged_s - computed_s)
        return StepPrediction(machines, global_batch, local_batch, computed_s, merged_s)


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between points, and extrapolate the first and last segments.

    >>> interpolate([(0, 1), (2, 5)], 3)
    7.0
    """
    if len(points) == 1:
        return points[0][1]
    index = next((i for i in range(1, len(points) - 1) if x <= points[i][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def machine_counts(most: int) -> list[int]:
    """Powers of two up to `most`, and `most` itself.

    >>> machine_counts(6)
    [1, 2, 4, 6]
    """
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def measured_counts(most: int) -> list[int]:
    """Numbers of replicas to measure a program with: one, the maximum, and one in between.

    >>> measured_counts(64)
    [1, 8, 64]
    """
    return sorted({1, round(math.sqrt(most)), most})
