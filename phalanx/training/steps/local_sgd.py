"""Local SGD: replicas take steps of their own and exchange weights every `SyncPeriod.steps` steps.

Theory
------
Since the last exchange, replica r has gone from `start_r` to `w_r`. With n_r of the N samples of these steps,

    progress = sum over r of n_r / N (start_r - w_r)        one exchange, which may be compressed
    anchor   = outer step(anchor, progress)                 the same bits on every rank

and all continue from the anchor: w_r = start_r = anchor. With Stich's local SGD the outer step takes the mean itself;
with DiLoCo it is SGD with momentum, for which the progress takes the role of a gradient. A replica without samples in
these steps does not count, so streams of unequal length need nothing more.

*Overlapped*, an exchange proceeds while the replicas take the next steps, and takes effect at the next exchange: the
new anchor replaces what the replicas began from, and what each has done since stays its own,

    w_r = anchor - (start_r - w_r)

until it is merged in turn. At the end of an epoch all is merged, without overlap: validation, checkpoints and callbacks
see one model.

*Elastic jobs.* What a replica has done since the last exchange is lost with it; the others repeat an exchange in which
it is lost. Processes join where all are merged, and checkpoints are written there: right after an exchange, or at the
beginning of an epoch. In elastic jobs, and in those that are saved, exchanges are not overlapped.

Layer state (averages of batch normalization) is averaged with the weights. Optimizers keep their moments to themselves;
when `fit` ends these are averaged, so that what is saved or trained on then is one model's.
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
        overlaps: whether exchanges may proceed during the steps after them.
        exchange: the weights that all have in common.
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
        # Samples that this rank has trained on: in this epoch, as far as its metrics still count them; in this epoch;
        # in this `fit`.
        self._trained = self._averaged = self._all_trained = 0
        self._metrics_start: list[Any] = []  # when they were reset
        # What an exchange averages: the weights, then the layer state, and others that may have changed.
        self._variables: list[Any] = []
        self._optimizer = inner_optimizer(model.optimizer)
        # Steps without samples count for schedules only: an optimizer that accumulates gradients decides by this number
        # when to update, and Adam how many steps its moments contain.
        follows_schedule = isinstance(getattr(self._optimizer, "_learning_rate", None), LearningRateSchedule)
        accumulates = getattr(self._optimizer, "gradient_accumulation_steps", None)
        self._iterations = self._optimizer._iterations if follows_schedule and not accumulates else None
        # Merged, at the end of an epoch; None while it runs, when each rank logs its own batches.
        self._logs: Mapping[str, Any] | None = None
        self._pooled_logs: Mapping[str, Any] | None = None  # of what `_metrics_start` contains of this epoch

    @property
    def is_merged(self) -> bool:
        """See `ReplicaStepper.is_merged`."""
        return self.exchange.steps == 0

    def begin(self, *, watched: bool, entering: bool = False) -> None:
        """See `ReplicaStepper.begin`. The logs of single batches are this replica's own."""
        weights, layer_state = self._model.trainable_variables, self._engine.layer_state()
        # A step of the program's own, or a callback, may let others follow the weights, as those of a teacher.
        may_change = watched or overrides(self._model, "train_step")
        self._variables = [*weights, *layer_state, *(frozen_weights(self._model) if may_change else ())]
        # A process that resumes or joins has these from `load_pooled` or `admit`, of the middle of the epoch.
        if not entering:
            self._trained = 0
        # Also from a checkpoint of a job that merged every step: all ranks have what it had counted.
        if not entering or not self._metrics_start:
            self._metrics_start = self._engine.metric_rules.values()
        self._logs = self._pooled_logs = None
        self.exchange.begin(self._engine.read(self._variables), len(weights))

    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""
        if batch.size:
            self._merge.expect(batch.global_size, batch.fixed_size)
            with self._merge.in_mode(MergeMode.LOCAL):
                self._engine.train(batch.data, batch.share)
        elif self._iterations is not None:  # schedules proceed, as on the other ranks
            (steps,) = self._engine.read([self._iterations])
            self._engine.write([(self._iterations, np.asarray(steps + 1, steps.dtype))])
        self._trained += batch.size
        self._averaged += batch.size
        self._all_trained += batch.size
        self.exchange.took_step(batch.size)

    def merge_if_due(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """See `ReplicaStepper.merge_if_due`."""
        if self.exchange.steps < self._period.steps:
            return ()
        tasks = self._exchange(retry, overlap=self.overlaps)
        if self._replica.elastic is not None:  # what a member has counted is not lost with it then
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
        """See `ReplicaStepper.admit`. Each rank keeps its optimizer's moments, and what its metrics have counted."""
        elastic = self._replica.elastic
        # The others have weights in common already, and optimizer moments and metrics of their own, which they keep.
        fresh = elastic is not None and elastic.needs_state
        state_sync.synchronise(self._model, self._replica, take=fresh)
        self.exchange.synchronise(self._replica.communicator, take=fresh)
        start = self._replica.communicator.broadcast(self._metrics_start or self._engine.metric_rules.values())
        if fresh:
            self._metrics_start = start
            self._forget_metrics()
            self._trained = self._all_trained = 0

    def pooled(self) -> State:
        """See `ReplicaStepper.pooled`. The chief, which saves it, takes over what all metrics have counted."""
        counts = self._replica.gather(self._trained)
        if any(counts):
            self._engine.merged_metrics(self._trained / sum(counts), self._metrics_start, final=True, training=True)
            self._trained = sum(counts) if self._replica.is_chief else 0
            if not self._replica.is_chief:
                self._forget_metrics()
        pooled = self.exchange.pooled(self._replica.communicator)
        start = {f"start/{number}": array for number, array in enumerate(self._metrics_start)}
        return (
            {f"exchange/{name}": array for name, array in pooled.items()} | start | {"trained": np.array(sum(counts))}
        )

    def load_pooled(self, state: State) -> None:
        """See `ReplicaStepper.load_pooled`."""
        if "trained" not in state:
            return  # written by a job that merged every step
        self.exchange.load_pooled(strip_prefix("exchange/", state), self._replica.world_size)
        self._trained = int(state["trained"]) if self._replica.is_chief else 0
        start = strip_prefix("start/", state)
        self._metrics_start = [np.asarray(start[name]) for name in sorted(start, key=int)]
        if not self._replica.is_chief:
            self._forget_metrics()

    def _exchange(self, retry: RetryOnMembershipChange, *, overlap: bool) -> Sequence[str]:
        progress.enter("exchange")
        timeline.current.enter("exchange")
        # Read once, before any attempt: what this rank has done stays the same if the exchange is repeated.
        own = self._engine.read(self._variables)
        tasks: list[str] = []

        def run() -> list[Any]:
            # Of the attempt that succeeds: the samples of members that were lost meanwhile are not in the exchange.
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
        self._averaged = 0  # not before: it is repeated if a member is lost

    def _pool_metrics(self, retry: RetryOnMembershipChange) -> None:
        """Let the metrics of all ranks continue from what all of them have counted."""
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
        """This rank's part of the samples of all ranks; None if there are none."""
        total = sum(self._replica.gather(samples))
        return samples / total if total else None

    def _forget_metrics(self) -> None:
        """Another rank has what they have counted since they were reset."""
        self._engine.metric_rules.set_values(self._metrics_start)
