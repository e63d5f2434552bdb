"""Sharded optimizer (optional fast path): replicas of one host each update a part of the weights.

Theory
------
Where every replica updates all weights, n replicas do the same work n times, and an optimizer like Adam, which reads or
writes seven numbers for each weight, takes as long as the merge of the gradients. Here each replica has a part of the
weights, and of the optimizer's state for them (Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in
Data-Parallel Training"; the first stage of ZeRO, Rajbhandari et al. 2020). The replicas share a block of memory:

    gradients of rank 0 | ... | of rank n - 1 | weights | weights | metrics of rank 0 | ... | a flag of each rank

In each row all variables lie one after the other, and the r-th part of the row is rank r's. In a step a rank

1. writes its gradients, times its share of the batch, to its row,
2. waits for the others,
3. updates its part with the sum of that part of all rows, in rank order, and writes it to the row of weights that is
   not in use,
4. waits for the others, and computes the next step from these weights, where they lie.

No rank writes what another one reads: a rank comes to 1 again when all have done 3, in which the gradients are read;
and a rank writes to one of the two rows of weights in 3 when all have done 1, for which they had read what lay there.
The weights of the step before stay, for a step that fails.

All else differs between the ranks until the epoch ends. Then the metrics are merged, and every rank gets the whole
state of the optimizer: between epochs all replicas are alike, as callbacks and checkpoints expect. Where a progress bar
shows the metrics meanwhile, each rank writes what its metrics have counted along with its gradients, and the sums are
taken in 3.

Where a rank has no gradient of a variable (on PyTorch, if the loss does not depend on it), Keras's optimizers leave
that variable and its moments alone. A rank that meets this sets its flag in 1; all see it in 3, and take all further
steps as `SynchronousStepper` does.

This path is optional: `SynchronousStepper` takes the same steps with the same results. `applies` says for which models
it is used: not for optimizers that use norms, callbacks that see single batches, or layers whose state is merged.
`PHALANX_SHARDED_OPTIMIZER=0` disables it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from phalanx.arrays.flat_buffer import UNIT, FlatBuffer
from phalanx.collectives.communicator_factory import shared_block
from phalanx.collectives.host.shared_segment import SharedSegment
from phalanx.config.job_config import uses_sharded_optimizer
from phalanx.engines import make_updater
from phalanx.engines.accelerations.vectorized_updater import is_elementwise
from phalanx.engines.engine import Engine
from phalanx.engines.updater import UpdaterPiece
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.object_config import config_json_of
from phalanx.keras_compat.optimizer_slots import OptimizerSlot, slots_of_model
from phalanx.monitoring import timeline
from phalanx.runtime import progress
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica import Replica
from phalanx.training.steps.gradient_merge import StepMerge
from phalanx.training.steps.optimizer_properties import takes_keras_steps
from phalanx.training.steps.stepper import ReplicaStepper, RetryOnMembershipChange
from phalanx.training.steps.synchronous import SynchronousStepper

Array = np.ndarray[Any, Any]

_DTYPE = np.dtype(np.float32)


def applies(model: Any, engine: Engine, merge: StepMerge, replica: Replica) -> bool:
    """Whether this model's steps can be taken this way, as far as this rank knows."""
    variables, optimizer = model.trainable_variables, model.optimizer
    return (
        uses_sharded_optimizer()
        and replica.world_size > 1
        and replica.elastic is None  # a lost member would take a part of the optimizer's state with it
        and replica.cross_device_ops is None
        and not merge.separate
        and engine.merges_only_gradients
        and takes_keras_steps(model)
        and _is_elementwise(optimizer)
        and len({bool(optimizer._use_weight_decay(v)) for v in variables if optimizer.weight_decay}) <= 1
        and bool(variables)
        and all(_is_float32(variable) for variable in [*variables, *model.metrics_variables])
    )


def _is_elementwise(optimizer: Any) -> bool:
    """Whether the optimizer treats each number by itself, at every step, with nothing but its configuration."""
    rate = getattr(optimizer, "_learning_rate", None)
    return (
        isinstance(rate, (keras.Variable, keras.optimizers.schedules.LearningRateSchedule))
        and not optimizer.gradient_accumulation_steps
        and not optimizer.loss_scale_factor
        and not optimizer.use_ema
        and is_elementwise(json.loads(config_json_of(optimizer)))
    )


def _is_float32(variable: Any) -> bool:
    return (
        keras.backend.standardize_dtype(variable.dtype) == _DTYPE.name
        and variable.constraint is None
        and not variable.overwrite_with_gradient
    )


def make_sharded_stepper(
    model: Any, engine: Engine, merge: StepMerge, replica: Replica
) -> ShardedOptimizerStepper | None:
    """The stepper of a model to which this `applies` on all ranks; None where the ranks cannot share memory, or where
    it is not known what the optimizer keeps. All ranks must call."""
    try:
        state: _OptimizerState | None = _OptimizerState(model)
    except UnsupportedError:
        state = None
    if replica.any(state is None):
        return None
    rows = _SharedRows.create(model, replica)
    return (
        None if rows is None or state is None else ShardedOptimizerStepper(model, engine, merge, replica, rows, state)
    )


class _OptimizerState:
    """The variables of a model's optimizer, by the name of their slot.

    Attributes:
        per_variable: a variable for each of the model's.
        single: variables that belong to none of the model's.

    Raises: UnsupportedError if the slots of some variables are unknown.
    """

    def __init__(self, model: Any) -> None:
        variables, own = model.trainable_variables, model.optimizer.variables
        slots = slots_of_model(model.optimizer, variables)
        if len(slots) != len(own):
            raise UnsupportedError("The optimizer was built for other variables.")
        by_slot = dict(zip(slots, own, strict=True))
        self.single = {slot.name: variable for slot, variable in by_slot.items() if slot.variable < 0}
        names = {slot.name for slot in slots if slot.variable >= 0}
        numbers = range(len(variables))
        missing = [slot for name in names for n in numbers if (slot := OptimizerSlot(n, name)) not in by_slot]
        if missing:
            raise UnsupportedError(f"The optimizer keeps no {missing[0].name!r} for some variables.")
        self.per_variable = {name: [by_slot[OptimizerSlot(n, name)] for n in numbers] for name in names}


class _SharedRows:
    """The block of memory that the replicas share, and this rank's places in it.

    Attributes:
        weights: layout of the weights in a row.
        metrics: layout of the metrics' variables in a row.
        metrics_start: their values when the epoch began.
        gradients: views of this rank's row of gradients.
        own_parts: this rank's part of every rank's gradients.
        new_weights: of the two rows of weights, each with this rank's part and views; the first is in use.
        own_counts: views of this rank's row of metrics.
        counts: all rows of metrics.
        flags: one number for each rank.
    """

    def __init__(self, weights: FlatBuffer, metrics: FlatBuffer, replica: Replica, segment: SharedSegment) -> None:
        rank, ranks = replica.rank, replica.world_size
        numbers = np.frombuffer(segment.memory, _DTYPE)
        bounds = np.cumsum([(ranks + 2) * weights.size, ranks * metrics.size])
        of_weights, of_metrics, flags = np.split(numbers, bounds)
        *rows, first, second = of_weights.reshape(-1, weights.size)
        part = slice(rank * weights.part_size, (rank + 1) * weights.part_size)
        self.weights = weights
        self.metrics = metrics
        self.metrics_start: list[Any] = []
        self.own_row = rows[rank]
        self.gradients = weights.unpack(self.own_row)
        self.own_parts = [[row[part]] for row in rows]
        self.new_weights = [(row[part], weights.unpack(row)) for row in (first, second)]
        self.counts = of_metrics.reshape(ranks, -1)
        self.own_counts = metrics.unpack(self.counts[rank])
        self.flags = flags[::UNIT]

    @classmethod
    def create(cls, model: Any, replica: Replica) -> _SharedRows | None:
        """Rows for a model; None where the ranks cannot share memory. All ranks must call."""
        ranks = replica.world_size
        weights = FlatBuffer([tuple(variable.shape) for variable in model.trainable_variables], ranks)
        metrics = FlatBuffer([tuple(variable.shape) for variable in model.metrics_variables], 1)
        numbers = (ranks + 2) * weights.size + ranks * (metrics.size + UNIT)
        segment = shared_block(replica.communicator, numbers * _DTYPE.itemsize)
        return None if segment is None else cls(weights, metrics, replica, segment)


class _GradientMissingError(Exception):
    """Some rank has no gradient of some variable."""


class ShardedOptimizerStepper(ReplicaStepper):
    """See the top of this file, and `stepper.ReplicaStepper`.

    Attributes:
        shows: whether a callback of any rank shows logs of single batches.
    """

    merges_every_step = True

    def __init__(
        self,
        model: Any,
        engine: Engine,
        merge: StepMerge,
        replica: Replica,
        rows: _SharedRows,
        state: _OptimizerState,
    ) -> None:
        self._model = model
        self._engine = engine
        self._merge = merge
        self._replica = replica
        self._rows = rows
        self._state = state
        self._variables = list(model.trainable_variables)
        self._optimizer = optimizer = model.optimizer
        decays = bool(optimizer.weight_decay) and optimizer._use_weight_decay(self._variables[0])
        piece = UpdaterPiece(f"part of rank {replica.rank}", np.zeros(rows.weights.part_size, _DTYPE), None, decays)
        self._updater = make_updater(config_json_of(optimizer), [piece])
        self.shows = False
        self._counted: Array | None = None  # what all metrics have counted, after the last step
        self._fallback: SynchronousStepper | None = None
        self._share = _DTYPE.type(1)
        self._has_stepped = False  # in this epoch
        self._logs: Mapping[str, Any] | None = None  # of the epoch that is over

    @property
    def has_fallen_back(self) -> bool:
        """Whether this model turned out to need `SynchronousStepper`."""
        return self._fallback is not None

    def serves(self, model: Any, engine: Engine) -> bool:
        """Whether this was made for what the model and its optimizer are now."""
        variables = model.trainable_variables
        return (
            engine is self._engine
            and model.optimizer is self._optimizer
            and len(variables) == len(self._variables)
            and all(own is variable for own, variable in zip(self._variables, variables, strict=True))
            and self._rows.metrics.shapes == [tuple(variable.shape) for variable in model.metrics_variables]
        )

    def begin(self, *, watched: bool, entering: bool = False) -> None:
        """See `ReplicaStepper.begin`. Takes over what weights and optimizer are now: callbacks may have set them."""
        if self._fallback is not None:
            self._fallback.begin(watched=watched, entering=entering)
            return
        self._has_stepped, self._logs, self._counted = False, None, None
        self._rows.metrics_start = self._engine.metric_rules.values()
        engine, rank, pack_part = self._engine, self._replica.rank, self._rows.weights.pack_part
        values = {0: pack_part(engine.read(self._variables), rank)}
        state = {
            place: pack_part(engine.read(self._state.per_variable[slot.name]), rank)
            if slot.variable >= 0
            else engine.read([self._state.single[slot.name]])[0]
            for place, slot in enumerate(self._updater.slots)
        }
        self._updater.load(values, state)

    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""
        if self._fallback is None:
            try:
                self._take_step(batch)
            except _GradientMissingError:
                self._fallback = self._fall_back()
        if self._fallback is not None:
            self._fallback.train(batch, last=last)

    def _take_step(self, batch: JointBatch) -> None:
        self._share = _DTYPE.type(batch.share)
        self._merge.exchange = self._exchange
        try:
            self._engine.train(batch.data, batch.share)
        finally:
            self._merge.exchange = None
        self._has_stepped = True

    def _fall_back(self) -> SynchronousStepper:
        """A stepper that finds everything as if it had taken the steps before."""
        self._gather()
        stepper = SynchronousStepper(self._model, self._engine, self._merge, self._replica, accumulates=False)
        stepper.begin(watched=False)
        return stepper

    def _exchange(self, gradients: Sequence[Array], metrics: Sequence[Any]) -> list[Array | None]:
        """See `Merge.exchange`. The numbers are those of the steps at the top of this file."""
        rows, barrier = self._rows, self._replica.communicator.barrier
        progress.enter("all_reduce")
        timeline.current.enter("merge")
        # 1
        rows.flags[self._replica.rank] = any(gradient is None for gradient in gradients)
        if self._share:
            with np.errstate(all="ignore"):  # infinities are values here
                for gradient, place in zip(gradients, rows.gradients, strict=True):
                    if gradient is not None:
                        np.multiply(gradient, self._share, out=place)
        else:  # a placeholder batch counts nowhere
            rows.own_row.fill(0)
        if self.shows:
            for value, place in zip(metrics, rows.own_counts, strict=True):
                np.copyto(place, value, casting="same_kind")
        # 2
        barrier("gradients", rows.own_row.nbytes)
        timeline.current.enter("apply")
        # 3
        if rows.flags.any():
            raise _GradientMissingError
        if self.shows:
            self._counted = rows.counts.sum(axis=0)
        self._updater.apply_sum(rows.own_parts)
        rows.new_weights.reverse()
        part, weights = rows.new_weights[0]
        np.copyto(part, self._updater.fetch((0,), ())[0][0])
        # 4
        barrier("new weights", part.nbytes)
        progress.enter("update")
        return list(weights)

    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """See `ReplicaStepper.finish`."""
        if self._fallback is not None:
            return self._fallback.finish(retry)
        self._gather()
        return ()

    def _gather(self) -> None:
        """Give every rank the whole state of the optimizer, and what all metrics have counted."""
        if not self._has_stepped:
            return
        values: list[tuple[Any, Array]] = []
        own: list[Array] = []
        names: list[str] = []
        for slot, value in zip(self._updater.slots, self._updater.optimizer_values(), strict=True):
            if slot.variable < 0:
                values.append((self._state.single[slot.name], value))
            else:
                names.append(slot.name)
                own.append(value)
        if own:
            parts = self._replica.communicator.all_gather(np.stack(own))
            for name, *pieces in zip(names, *parts, strict=True):
                arrays = self._rows.weights.unpack(np.concatenate(pieces))
                values += zip(self._state.per_variable[name], arrays, strict=True)
        self._engine.write(values)
        self._logs = self._engine.merged_metrics(
            1 / self._replica.world_size, self._rows.metrics_start, final=True, training=True
        )

    def logs(self) -> Mapping[str, Any]:
        """See `Stepper.logs`."""
        if self._fallback is not None:
            return self._fallback.logs()
        if self._logs is not None:
            return self._logs
        if self._counted is not None:
            return self._engine.results_of(self._rows.metrics.unpack(self._counted))
        return self._engine.logs()
