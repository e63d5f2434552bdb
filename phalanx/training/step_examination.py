"""Examination of a program's `fit` by `phalanx plan`: measures a few steps, or compiles one without running it.

Then the program ends. Its state is not touched: no callback runs, nothing is validated, restored or saved.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import keras
import numpy as np

from phalanx.arrays.tree import map_leaves
from phalanx.collectives.host.recording_algorithm import RecordedCall, RecordingAlgorithm
from phalanx.config.plan_request import PlanRequest
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.patching import override_methods
from phalanx.planning.accelerators import DeviceTopology, parse_topology
from phalanx.planning.program_measurement import ProgramMeasurement
from phalanx.planning.step_measurement import StepMeasurement, write_result
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.fit_loop import FitLoop
from phalanx.training.fit_setup import ReplicaFit, prepare_fit, shard_training_data
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica import Replica
from phalanx.training.replica_coordination import ReplicaCoordination
from phalanx.training.replica_model import ReplicaModel
from phalanx.training.steps.optimizer_properties import accumulation_steps

WARM_UP_STEPS = 4
"""Number of steps before the measured ones: the first compiles, and some of the next still allocate."""
MAX_STEPS, MIN_STEPS = 60, 5
MAX_SECONDS = 5.0
"""Time in seconds after which fewer steps suffice."""
MANY_EPOCHS = 1_000_000


def is_examined(replica: Replica) -> bool:
    """Whether `phalanx plan` runs this program to examine this replica's model."""
    return replica.recording is not None or PlanRequest.from_environment() is not None


def examine_fit(replica_model: ReplicaModel, arguments: FitArguments) -> NoReturn:
    """Measure or compile the step of a `fit`, write the plan's result, and end the program.

    Raises:
        SystemExit: the result is written.
        UnsupportedError: the `fit` was over before enough steps, or cannot be examined in this way.
    """
    plan = PlanRequest.from_environment()
    assert plan is not None, "see is_examined"
    if plan.topology:
        write_result(plan.result, _compile_step(replica_model, arguments, parse_topology(plan.topology)))
    else:
        write_result(plan.result, _measure_steps(replica_model, arguments))
    sys.exit(0)


def _compile_step(replica_model: ReplicaModel, arguments: FitArguments, topology: DeviceTopology) -> ProgramMeasurement:
    from phalanx.engines.spmd.topology_step import measure_step  # imports JAX

    source = shard_training_data(replica_model, arguments, seed=0)
    part = source.peek()
    samples = part.global_size or part.size * replica_model.replica.world_size
    data = map_leaves(lambda array: _with_rows(array, samples), part.data)
    return measure_step(replica_model.model, replica_model.policy.placement, data, topology)


def _with_rows(array: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    """Return zeros of this dtype and row shape with `rows` rows, which take no memory; scalars stay scalars."""
    return np.broadcast_to(np.zeros((), array.dtype), (rows, *array.shape[1:]) if array.ndim else ())


def _measure_steps(replica_model: ReplicaModel, arguments: FitArguments) -> StepMeasurement:
    recording, policy = replica_model.replica.recording, replica_model.policy
    if recording is None:
        raise UnsupportedError(
            "The strategy of this program compiles one program for many devices. Plan it for these: phalanx plan "
            "SCRIPT --topology v5e:2x4."
        )
    nothing_else: dict[str, Any] = {"callbacks": None, "validation_data": None, "validation_split": 0.0, "verbose": 0}
    epochs = arguments.initial_epoch + MANY_EPOCHS
    fit = prepare_fit(replica_model, replace(arguments, epochs=epochs, **nothing_else), None)
    period = 1 if policy.period is None else policy.period.steps
    timer = StepTimer(fit.state.stepper.train, recording, cycle=period * accumulation_steps(replica_model.model))
    override_methods(fit.state.stepper, train=timer.train)
    try:
        FitLoop(replica_model.model, fit.state, ReplicaCoordination(fit)).run()
    except _MeasurementComplete:
        return _measurement(timer, fit)
    raise UnsupportedError(
        f"fit() of {replica_model.model.name!r} was over after {timer.steps} steps, and `phalanx plan` needs "
        f"{WARM_UP_STEPS + MIN_STEPS}: the data can be read only once. Give the program more of them."
    )


class _MeasurementComplete(BaseException):
    """Raised after enough steps. No `except Exception` of the program can catch it."""


class StepTimer:
    """Substitute for a stepper's `train` that records how long steps compute, their size and what they merge.

    Args:
        train_step: The stepper's original `train`.
        cycle: Number of steps after which the collectives repeat.
    """

    def __init__(self, train_step: Callable[..., None], recording: RecordingAlgorithm, cycle: int) -> None:
        self._train_step = train_step
        self._recording = recording
        self.cycle = cycle
        self.steps = 0
        self.sizes: Counter[tuple[int, int]] = Counter()
        self.seconds: list[float] = []
        self.calls: list[list[RecordedCall]] = []
        self._began_at = 0.0

    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        now = time.perf_counter()  # from entry to entry: reading a batch and the epoch's own work count as well
        if self.steps > WARM_UP_STEPS:
            self.seconds.append(now - self._began_at - self._recording.seconds)
            self.calls.append(self._recording.calls)
        if self._is_complete():
            raise _MeasurementComplete
        self._began_at = now
        self._recording.reset()
        self.steps += 1
        self.sizes[batch.size, batch.global_size] += 1
        self._train_step(batch, last=last)

    def _is_complete(self) -> bool:
        taken = len(self.seconds)
        if taken < max(MIN_STEPS, 2 * self.cycle):
            return False
        return taken >= MAX_STEPS or sum(self.seconds) > MAX_SECONDS

    def usual_cycle(self) -> tuple[float, tuple[RecordedCall, ...]]:
        """Return the seconds per step, the median over cycles, and the calls of the most frequent kind of cycle:
        between epochs the ranks exchange more."""
        starts = range(0, len(self.seconds) - self.cycle + 1, self.cycle)
        # Over whole cycles, because the steps of a cycle differ: some merge, some accumulate.
        seconds = statistics.median(sum(self.seconds[start : start + self.cycle]) for start in starts) / self.cycle
        cycles = [tuple(call for calls in self.calls[start : start + self.cycle] for call in calls) for start in starts]
        return seconds, Counter(cycles).most_common(1)[0][0]


def _measurement(timer: StepTimer, fit: ReplicaFit) -> StepMeasurement:
    period = fit.model.policy.period
    (local_batch, global_batch), _ = timer.sizes.most_common(1)[0]
    seconds, calls = timer.usual_cycle()
    return StepMeasurement(
        replicas=fit.model.replica.world_size,
        local_batch=local_batch,
        global_batch=global_batch,
        computed_s=seconds,
        steps=len(timer.seconds),
        cycle=timer.cycle,
        collectives=calls,
        overlaps=period is not None and period.overlap,
        weights=sum(math.prod(variable.shape) for variable in fit.model.model.trainable_variables),
        backend=keras.backend.backend(),
    )
