"""The `fit` of a program that `phalanx plan` examines: a few measured steps, then the program ends.

Nothing of the program's is touched: no callback runs, nothing is validated, restored or saved.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import keras

from phalanx.collectives.host.recording_algorithm import RecordedCall, RecordingAlgorithm
from phalanx.config.plan_request import PlanRequest
from phalanx.errors import UnsupportedError
from phalanx.planning.step_measurement import StepMeasurement, write_result
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.fit_loop import FitLoop
from phalanx.training.fit_setup import ReplicaFit, prepare_fit
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica_coordination import ReplicaCoordination
from phalanx.training.replica_model import ReplicaModel
from phalanx.training.steps.optimizer_properties import accumulation_steps
from phalanx.training.steps.stepper import ReplicaStepper, RetryOnMembershipChange

WARM_UP_STEPS = 4
"""The first compile; of the next some still allocate."""
STEPS, LEAST_STEPS = 60, 5
ENOUGH_S = 5.0
"""After so many seconds, fewer steps will do."""
MANY_EPOCHS = 1_000_000


def examine_fit(replica_model: ReplicaModel, arguments: FitArguments) -> NoReturn:
    """Measure the steps of a `fit`, write the plan's result, and end the program.

    Raises:
        SystemExit: the result is written.
        UnsupportedError: the `fit` was over before enough steps.
    """
    plan, recording, policy = PlanRequest.from_environment(), replica_model.replica.recording, replica_model.policy
    assert plan is not None, "its replica records, so the program is examined"
    assert recording is not None, "see the caller"
    nothing_else: dict[str, Any] = {"callbacks": None, "validation_data": None, "validation_split": 0.0, "verbose": 0}
    epochs = arguments.initial_epoch + MANY_EPOCHS
    fit = prepare_fit(replica_model, replace(arguments, epochs=epochs, **nothing_else), None)
    period = 1 if policy.period is None else policy.period.steps
    timer = StepTimer(fit.state.stepper, recording, cycle=period * accumulation_steps(replica_model.model))
    fit.state.stepper = timer
    try:
        FitLoop(replica_model.model, fit.state, ReplicaCoordination(fit)).run()
    except _Measured:
        write_result(plan.result, _measurement(timer, fit))
        sys.exit(0)
    raise UnsupportedError(
        f"fit() of {replica_model.model.name!r} was over after {timer.steps} steps, and `phalanx plan` needs "
        f"{WARM_UP_STEPS + LEAST_STEPS}: the data can be read only once. Give the program more of them."
    )


class _Measured(BaseException):
    """Enough steps. No `except Exception` of the program's may stop it."""


class StepTimer(ReplicaStepper):
    """Takes the steps of another stepper, and notes how long they compute, how large they are and what they merge.

    Args:
        cycle: number of steps after which the collectives repeat.
    """

    def __init__(self, stepper: ReplicaStepper, recording: RecordingAlgorithm, cycle: int) -> None:
        self._stepper = stepper
        self._recording = recording
        self.cycle = cycle
        self.steps = 0
        self.sizes: Counter[tuple[int, int]] = Counter()
        self.seconds: list[float] = []
        self.calls: list[list[RecordedCall]] = []
        self._began_at = 0.0
        self.merges_every_step = stepper.merges_every_step

    @property
    def is_merged(self) -> bool:
        return self._stepper.is_merged

    def begin(self, *, watched: bool, entering: bool = False) -> None:
        self._stepper.begin(watched=watched, entering=entering)

    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        now = time.perf_counter()  # from entry to entry: reading a batch and the epoch's own work count as well
        if self.steps > WARM_UP_STEPS:
            self.seconds.append(now - self._began_at - self._recording.seconds)
            self.calls.append(self._recording.calls)
        if self._is_enough():
            raise _Measured
        self._began_at = now
        self._recording.reset()
        self.steps += 1
        self.sizes[batch.size, batch.global_size] += 1
        self._stepper.train(batch, last=last)

    def _is_enough(self) -> bool:
        taken = len(self.seconds)
        if taken < max(LEAST_STEPS, 2 * self.cycle):
            return False
        return taken >= STEPS or sum(self.seconds) > ENOUGH_S

    def usual_cycle(self) -> tuple[float, tuple[RecordedCall, ...]]:
        """Seconds of a step, the median over cycles, and the calls of the most frequent kind of cycle: at the turn of
        an epoch the ranks agree on more."""
        starts = range(0, len(self.seconds) - self.cycle + 1, self.cycle)
        seconds = statistics.median(sum(self.seconds[start : start + self.cycle]) for start in starts) / self.cycle
        cycles = [tuple(call for calls in self.calls[start : start + self.cycle] for call in calls) for start in starts]
        return seconds, Counter(cycles).most_common(1)[0][0]

    def merge_if_due(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        return self._stepper.merge_if_due(retry)

    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        return self._stepper.finish(retry)

    def logs(self) -> Mapping[str, Any]:
        return self._stepper.logs()

    def end(self, retry: RetryOnMembershipChange) -> None:
        self._stepper.end(retry)


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
