"""Local SGD: replicas train independently and exchange weights every `SyncPeriod.steps` steps.

Theory
------
Since the last exchange, replica r has moved from `start_r` to `w_r`. With n_r of the N samples of these steps,

    progress = sum over r of n_r / N (start_r - w_r)        one exchange, which may be compressed
    anchor   = outer step(anchor, progress)                 bitwise equal on every rank

and all continue from the anchor: w_r = start_r = anchor. With Stich's local SGD the outer step takes the mean itself;
with DiLoCo it is SGD with momentum, with the progress as the gradient. A replica without samples in these steps does
not count, so streams of unequal length need no special case.

An *overlapped* exchange proceeds while the replicas take the next steps, and takes effect at the next exchange: the new
anchor replaces what the replicas started from, and each keeps its progress since then,

    w_r = anchor - (start_r - w_r)

until it is merged in turn. At the end of an epoch everything is merged, without overlap: validation, checkpoints and
callbacks see one model.

*Elastic jobs.* The progress of a replica since the last exchange is lost with it; the others repeat an exchange in
which it is lost. Processes join, and checkpoints are written, where everything is merged: right after an exchange, or
at the start of an epoch. Exchanges are not overlapped in elastic jobs, or in jobs that are saved.

Layer state (moving averages of batch normalization) is averaged with the weights. Optimizers keep their moments local;
when `fit` ends these are averaged, so that one model is saved, or trained further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from phalanx.compression import Compression
from phalanx.compression.base_compression import State, strip_prefix
from phalanx.engines.engine import Engine
from phalanx.keras_compat.model_state import frozen_weights, inner_optimizer, overrides
from phalanx.monitoring import timeline
from phalanx.runtime import progress
from phalanx.training import state_sync
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica import Replica
from phalanx.training.steps.gradient_merge import MergeMode, StepMerge
from phalanx.training.steps.optimizer_properties import inner_optimizers
from phalanx.training.steps.stepper import ReplicaStepper, RetryOnMembershipChange
from phalanx.training.steps.weight_exchange import WeightExchange
from phalanx.training.training_policy import SyncPeriod


class LocalSGDStepper(ReplicaStepper):
    """See the top of this file, and `stepper.ReplicaStepper`.

    Attributes:
        overlaps: Whether exchanges may proceed during the steps after them.
        exchange: The common weights.
    """

    merges_every_step = False

    def __init__(
        self,
        model: Any,
        engine: Engine,
        merge: StepMerge,
        replica: Replica,
        period: SyncPeriod,
        compression: Compression | None,
    ) -> None:
        super().__init__(model, engine, merge, replica)
        self._period = period
        self.overlaps = period.overlap
        self.exchange = WeightExchange(period.outer, compression)
        # Samples that this rank has trained on: those that its metrics still count, in this epoch, in this `fit`.
        self._trained = self._averaged = self._all_trained = 0
        self._metrics_start: list[Any] = []  # state of the metrics at their reset
        # The variables that an exchange averages: weights, then layer state, and others that may have changed.
        self._variables: list[Any] = []
        self._optimizer = inner_optimizer(model.optimizer)
        # Steps without samples count only for schedules: from this count, an optimizer that accumulates gradients
        # decides when to update, and Adam how many steps its moments contain.
        follows_schedule = isinstance(getattr(self._optimizer, "_learning_rate", None), LearningRateSchedule)
        accumulates = getattr(self._optimizer, "gradient_accumulation_steps", None)
        self._iterations = self._optimizer._iterations if follows_schedule and not accumulates else None
        # Merged at the end of an epoch; None during it, when each rank logs its own batches.
        self._logs: Mapping[str, Any] | None = None
        self._pooled_logs: Mapping[str, Any] | None = None  # of what `_metrics_start` contains of this epoch

    @property
    def is_merged(self) -> bool:
        """See `ReplicaStepper.is_merged`."""
        return self.exchange.steps == 0

    def begin(self, *, has_batch_listeners: bool, entering: bool = False) -> None:
        """See `ReplicaStepper.begin`. The logs of single batches are local to this replica."""
        weights, layer_state = self._model.trainable_variables, self._engine.layer_state()
        # A custom step or a callback may update other variables from the weights, such as those of a teacher.
        may_change = has_batch_listeners or overrides(self._model, "train_step")
        self._variables = [*weights, *layer_state, *(frozen_weights(self._model) if may_change else ())]
        # A process that resumes or joins has these from `load_combined` or `admit`, from the middle of the epoch.
        if not entering:
            self._trained = 0
        # Also after the checkpoint of a job that merged every step: all ranks have its counts.
        if not entering or not self._metrics_start:
            self._metrics_start = self._engine.metric_rules.values()
        self._logs = self._pooled_logs = None
        self.exchange.begin(self._engine.read(self._variables), len(weights))

    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""
        if batch.size:
            self._merge.set_batch_size(batch.global_size, batch.fixed_size)
            with self._merge.in_mode(MergeMode.LOCAL):
                self._engine.train(batch.data, batch.share)
        elif self._iterations is not None:  # schedules advance, as on the other ranks
            (steps,) = self._engine.read([self._iterations])
            self._engine.write([(self._iterations, np.asarray(steps + 1, steps.dtype))])
        self._trained += batch.size
        self._averaged += batch.size
        self._all_trained += batch.size
        self.exchange.record_step(batch.size)

    def merge_if_due(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """See `ReplicaStepper.merge_if_due`."""
        if self.exchange.steps < self._period.steps:
            return ()
        tasks = self._exchange(retry, overlap=self.overlaps)
        if self._replica.elastic is not None:  # so that a member's counts are not lost with it
            self._pool_metrics(retry)
        return tasks

    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """See `ReplicaStepper.finish`."""
        tasks = self._exchange(retry, overlap=False) if self.exchange.unmerged else ()
        retry(self._merge_moving_averages)
        self._pool_metrics(retry)
        self._logs = self._pooled_logs
        return tasks

    def logs(self) -> Mapping[str, Any]:
        """See `Stepper.logs`."""
        return self._engine.logs() if self._logs is None else self._logs

    def end(self, retry: RetryOnMembershipChange) -> None:
        """See `ReplicaStepper.end`."""

        def average() -> None:
            if (share := self._share(self._all_trained)) is not None:
                state_sync.average_optimizers(self._model, self._replica, share)

        retry(average)
        self._all_trained = 0

    def admit(self) -> None:
        """See `ReplicaStepper.admit`. Each rank keeps its optimizer moments and metric counts."""
        elastic = self._replica.elastic
        # The others already have common weights, and keep their local optimizer moments and metrics.
        fresh = elastic is not None and elastic.needs_state
        state_sync.synchronize(self._model, self._replica, adopt=fresh)
        self.exchange.synchronize(self._replica.communicator, adopt=fresh)
        start = self._replica.communicator.broadcast(self._metrics_start or self._engine.metric_rules.values())
        if fresh:
            self._metrics_start = start
            self._forget_metrics()
            self._trained = self._all_trained = 0

    def combined_state(self) -> State:
        """See `ReplicaStepper.combined_state`. The chief, which saves it, takes over the counts of all metrics."""
        counts = self._replica.gather(self._trained)
        if any(counts):
            self._engine.merged_metrics(self._trained / sum(counts), self._metrics_start, final=True, training=True)
            self._trained = sum(counts) if self._replica.is_chief else 0
            if not self._replica.is_chief:
                self._forget_metrics()
        pooled = self.exchange.combined_state(self._replica.communicator)
        start = {f"start/{number}": array for number, array in enumerate(self._metrics_start)}
        return (
            {f"exchange/{name}": array for name, array in pooled.items()} | start | {"trained": np.array(sum(counts))}
        )

    def load_combined(self, state: State) -> None:
        """See `ReplicaStepper.load_combined`."""
        if "trained" not in state:
            return  # written by a job that merged every step
        self.exchange.load_combined(strip_prefix("exchange/", state), self._replica.world_size)
        self._trained = int(state["trained"]) if self._replica.is_chief else 0
        start = strip_prefix("start/", state)
        self._metrics_start = [np.asarray(start[name]) for name in sorted(start, key=int)]
        if not self._replica.is_chief:
            self._forget_metrics()

    def _exchange(self, retry: RetryOnMembershipChange, *, overlap: bool) -> Sequence[str]:
        progress.enter("exchange")
        timeline.current.enter("exchange")
        # Read once, before any attempt: this rank's progress stays the same if the exchange is repeated.
        own = self._engine.read(self._variables)
        tasks: list[str] = []

        def run() -> list[Any]:
            # For the attempt that succeeds: samples of members that were lost earlier are not in the exchange.
            tasks[:] = [member.task for member in self._replica.communicator.membership.members]
            return self.exchange.run(own, self._replica, overlap=overlap)

        values = retry(run)
        self._engine.write(list(zip(self._variables, values, strict=True)))
        progress.enter("update")
        timeline.current.leave()
        return tasks

    def _merge_moving_averages(self) -> None:
        """Average the moving averages of the weights, which callbacks may swap in (SwapEMAWeights)."""
        optimizers = inner_optimizers(self._model.optimizer)
        own = [each for one in optimizers for each in getattr(one, "_model_variables_moving_average", ())]
        share = self._share(self._averaged) if own else None
        if share is not None:
            means = self._replica.communicator.all_reduce(self._engine.read(own), scale=share)
            self._engine.write(list(zip(own, means, strict=True)))
        self._averaged = 0  # not before, because the merge is repeated if a member is lost

    def _pool_metrics(self, retry: RetryOnMembershipChange) -> None:
        """Continue the metrics of all ranks from their combined counts."""
        logs = retry(self._merge_metrics)
        if logs is not None:
            self._pooled_logs, self._metrics_start = logs, self._engine.metric_rules.values()
        self._trained = 0

    def _merge_metrics(self) -> Mapping[str, Any] | None:
        share = self._share(self._trained)
        if share is None:
            return None
        return self._engine.merged_metrics(share, self._metrics_start, final=True, training=True)

    def _share(self, samples: int) -> float | None:
        """Return this rank's share of the samples of all ranks; None if there are none."""
        total = sum(self._replica.gather(samples))
        return samples / total if total else None

    def _forget_metrics(self) -> None:
        """Discard what the metrics have counted since their reset, because another rank holds it."""
        self._engine.metric_rules.set_values(self._metrics_start)
