"""Replicas of one host that each make the update of a part of the weights.

Theory
------
Where every replica updates all weights, n replicas do the same work n times, and an optimizer like Adam, which reads or
writes seven numbers for each weight, takes as long as the merge of the gradients. Here each has a part of the weights,
and of what the optimizer keeps for them (Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in
Data-Parallel Training"; the first stage of ZeRO, Rajbhandari et al. 2020). The replicas share a block of memory:

    gradients of rank 0 | ... | of rank n - 1 | weights | weights | metrics of rank 0 | ... | a flag of each rank

In each row all variables lie one after the other, and the r-th part of the row is rank r's. In a step a rank

1. writes its gradients, times its share of the batch, to its own row,
2. waits for the others,
3. updates its part with the sum of that part of all rows, in rank order, and writes it to the weights that are not in
   use,
4. waits for the others, and computes the next step from these weights, where they lie.

Nobody writes what another reads: a rank comes to 1 again when all have done 3, in which the gradients are read; and who
writes to one of the two rows of weights in 3 does so when all have done 1, for which they had read what lay there.
The weights of the step before stay, for a step that fails.

All else stays each rank's own until the epoch ends. Then the metrics are merged, and every rank gets the whole state of
the optimizer: between epochs all replicas are alike, as callbacks and checkpoints expect them. Where a bar shows the
metrics meanwhile, each rank writes what its own have counted along with its gradients, and the sums are taken in 3.

Where a rank has no gradient of a variable (PyTorch's word for one that the loss does not depend on), Keras's optimizers
leave that variable alone, and its moments. A rank that meets this says so with its flag in 1; all see it in 3, and from
then on take their steps as ever.

To an optimizer that looks at norms, to callbacks that see single batches, to layers whose state is merged, this does
not apply: see `applies`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from phalanx.arrays.flat_buffer import UNIT, FlatBuffer
from phalanx.collectives.factory import shared_block
from phalanx.collectives.host.shared_segment import SharedSegment
from phalanx.compression.base_compression import State
from phalanx.engines import make_updater
from phalanx.engines.accelerations.vectorized_updater import is_elementwise
from phalanx.engines.engine import Engine
from phalanx.engines.updater import OptimizerSlot, UpdaterPiece, slots_of_model
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.object_config import config_json_of
from phalanx.monitoring import timeline
from phalanx.runtime import progress
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica import Replica
from phalanx.training.steps.gradient_merge import StepMerge
from phalanx.training.steps.stepper import RetryOnMembershipChange, SynchronousStepper, takes_keras_steps

Array = np.ndarray[Any, Any]

_DTYPE = np.dtype(np.float32)


def applies(model: Any, engine: Engine, merge: StepMerge, replica: Replica) -> bool:
    """Whether this model's steps can be taken so, as far as this rank knows."""
    variables, optimizer = model.trainable_variables, model.optimizer
    return (
        replica.world_size > 1
        and replica.elastic is None  # a part of the optimizer's state would be lost with a member
        and replica.cross_device_ops is None
        and not merge.separate
        and engine.merges_only_gradients
        and takes_keras_steps(model)
        and _looks_at_numbers_alone(optimizer)
        and len({bool(optimizer._use_weight_decay(v)) for v in variables if optimizer.weight_decay}) <= 1
        and bool(variables)
        and all(_is_plain(variable) for variable in [*variables, *model.metrics_variables])
    )


def _looks_at_numbers_alone(optimizer: Any) -> bool:
    """Whether the optimizer treats each number by itself, at every step, and in the same way wherever it is made."""
    rate = getattr(optimizer, "_learning_rate", None)
    return (
        isinstance(rate, (keras.Variable, keras.optimizers.schedules.LearningRateSchedule))
        and not optimizer.gradient_accumulation_steps
        and not optimizer.loss_scale_factor
        and not optimizer.use_ema
        and is_elementwise(json.loads(config_json_of(optimizer)))
    )


def _is_plain(variable: Any) -> bool:
    return (
        keras.backend.standardize_dtype(variable.dtype) == _DTYPE.name
        and variable.constraint is None
        and not variable.overwrite_with_gradient
    )


def make_sharded_stepper(
    model: Any, engine: Engine, merge: StepMerge, replica: Replica
) -> ShardedOptimizerStepper | None:
    """What takes the steps of a model to which this `applies` on all ranks; None where they cannot share memory, or
    where the optimizer does not tell what it keeps. All ranks must call."""
    vector = FlatBuffer([tuple(variable.shape) for variable in model.trainable_variables], replica.world_size)
    try:
        resumable: _Kept | None = _Kept(model)
    except UnsupportedError:
        resumable = None
    if replica.any(resumable is None):
        return None
    metrics = FlatBuffer([tuple(variable.shape) for variable in model.metrics_variables], 1)
    ranks = replica.world_size
    numbers = (ranks + 2) * vector.size + ranks * (metrics.size + UNIT)
    segment = shared_block(replica.communicator, numbers * _DTYPE.itemsize)
    if segment is None or resumable is None:
        return None
    return ShardedOptimizerStepper(model, engine, merge, replica, vector, metrics, resumable, segment)


class _Kept:
    """What a model's optimizer keeps, by name.

    Attributes:
        arrays: a variable for each of the model's.
        single: variables of none.

    Raises: UnsupportedError if that cannot be told.
    """

    def __init__(self, model: Any) -> None:
        variables, own = model.trainable_variables, model.optimizer.variables
        slots = slots_of_model(model.optimizer, variables)
        if len(slots) != len(own):
            raise UnsupportedError("The optimizer was built for other variables.")
        by_slot = dict(zip(slots, own, strict=True))
        self.single = {slot.name: variable for slot, variable in by_slot.items() if slot.variable < 0}
        names = {slot.name for slot in slots if slot.variable >= 0}
        missing = [
            slot for name in names for n in range(len(variables)) if (slot := OptimizerSlot(n, name)) not in by_slot
        ]
        if missing:
            raise UnsupportedError(f"The optimizer keeps no {missing[0].name!r} for some variables.")
        self.arrays = {name: [by_slot[OptimizerSlot(n, name)] for n in range(len(variables))] for name in names}


class _GradientMissingError(Exception):
    """Some rank has no gradient of some variable."""


class ShardedOptimizerStepper:
    """See the top of this file, and `stepper.ReplicaStepper`.

    Args:
        vector: of the weights.
        metrics: of what the metrics keep.
        resumable: of the model's optimizer.
        segment: memory for the rows.

    Attributes:
        shows: whether somebody shows logs of single batches.
    """

    merges_every_step = is_merged = True

    def __init__(
        self,
        model: Any,
        engine: Engine,
        merge: StepMerge,
        replica: Replica,
        vector: FlatBuffer,
        metrics: FlatBuffer,
        resumable: _Kept,
        segment: SharedSegment,
    ) -> None:
        self._model = model
        self._engine = engine
        self._merge = merge
        self._replica = replica
        self._vector = vector
        self._kept = resumable
        self._variables = list(model.trainable_variables)
        self._optimizer = optimizer = model.optimizer
        decays = bool(optimizer.weight_decay) and optimizer._use_weight_decay(self._variables[0])
        piece = UpdaterPiece(f"part of rank {replica.rank}", np.zeros(vector.part_size, _DTYPE), None, decays)
        self._updater = make_updater(config_json_of(optimizer), [piece])
        ranks = replica.world_size
        numbers = np.frombuffer(segment.memory, _DTYPE)
        of_weights, of_metrics, flags = np.split(numbers, np.cumsum([(ranks + 2) * vector.size, ranks * metrics.size]))
        *rows, first, second = of_weights.reshape(-1, vector.size)
        self._own = slice(replica.rank * vector.part_size, (replica.rank + 1) * vector.part_size)
        self._row = rows[replica.rank]
        self._gradients = vector.unpack(self._row)
        self._parts = [[row[self._own]] for row in rows]
        self._weights = [(flat[self._own], vector.unpack(flat)) for flat in (first, second)]
        self.shows = False
        self._metrics = metrics
        self._counts = of_metrics.reshape(ranks, -1)
        self._own_counts = metrics.unpack(self._counts[replica.rank])
        self._counted: Array | None = None
        self._flags = flags[::UNIT]
        self._fallback: SynchronousStepper | None = None
        self._share = _DTYPE.type(1)
        self._stepped = False
        self._logs: Mapping[str, Any] | None = None

    @property
    def has_fallen_back(self) -> bool:
        """Whether steps of this model turned out not to be for this."""
        return self._fallback is not None

    def serves(self, model: Any, engine: Engine) -> bool:
        """Whether this was made for what the model and its optimizer are now."""
        variables = model.trainable_variables
        return (
            engine is self._engine
            and model.optimizer is self._optimizer
            and len(variables) == len(self._variables)
            and all(own is variable for own, variable in zip(self._variables, variables, strict=True))
            and self._metrics.shapes == [tuple(variable.shape) for variable in model.metrics_variables]
        )

    def begin(self, *, watched: bool, entering: bool = False) -> None:
        """See `ReplicaStepper.begin`. Whatever has been done to weights and optimizer since the last epoch counts."""
        if self._fallback is not None:
            self._fallback.begin(watched=watched, entering=entering)
            return
        self._stepped, self._logs, self._counted = False, None, None
        rank, pack_part = self._replica.rank, self._vector.pack_part
        values = {0: pack_part(self._engine.read(self._variables), rank)}
        state = {
            place: pack_part(self._engine.read(self._kept.arrays[slot.name]), rank)
            if slot.variable >= 0
            else self._engine.read([self._kept.single[slot.name]])[0]
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
        self._stepped = True

    def _fall_back(self) -> SynchronousStepper:
        """What takes the steps from here on, which finds everything as if it had taken those before."""
        self._gather()
        stepper = SynchronousStepper(self._model, self._engine, self._merge, self._replica, accumulates=False)
        stepper.begin(watched=False)
        return stepper

    def _exchange(self, gradients: Sequence[Array], metrics: Sequence[Any]) -> list[Array | None]:
        """See `Merge.exchange`."""
        barrier = self._replica.communicator.barrier
        progress.enter("all_reduce")
        timeline.current.enter("merge")
        self._flags[self._replica.rank] = any(gradient is None for gradient in gradients)
        if self._share:
            with np.errstate(all="ignore"):  # infinities are values here
                for gradient, place in zip(gradients, self._gradients, strict=True):
                    if gradient is not None:
                        np.multiply(gradient, self._share, out=place)
        else:  # a stand-in batch counts nowhere
            self._row.fill(0)
        if self.shows:
            for value, place in zip(metrics, self._own_counts, strict=True):
                np.copyto(place, value, casting="same_kind")
        barrier("gradients", self._row.nbytes)
        timeline.current.enter("apply")
        if self._flags.any():
            raise _GradientMissingError
        if self.shows:
            self._counted = self._counts.sum(axis=0)
        self._updater.apply_sum(self._parts)
        self._weights.reverse()
        part, weights = self._weights[0]
        np.copyto(part, self._updater.fetch((0,), ())[0][0])
        barrier("new weights", part.nbytes)
        progress.enter("update")
        return list(weights)

    def merge_if_due(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """See `ReplicaStepper.merge_if_due`."""
        return ()

    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """See `ReplicaStepper.finish`."""
        if self._fallback is not None:
            return self._fallback.finish(retry)
        self._gather()
        return ()

    def _gather(self) -> None:
        """Give every rank all of the optimizer's state, and what all metrics have counted."""
        if self._stepped:
            self._spread_state()
            self._logs = self._engine.merged_metrics(1 / self._replica.world_size, final=True, training=True)

    def _spread_state(self) -> None:
        """Give every rank the whole state of the optimizer."""
        values: list[tuple[Any, Array]] = []
        own: list[Array] = []
        names: list[str] = []
        for slot, value in zip(self._updater.slots, self._updater.optimizer_values(), strict=True):
            if slot.variable < 0:
                values.append((self._kept.single[slot.name], value))
            else:
                names.append(slot.name)
                own.append(value)
        if own:
            parts = self._replica.communicator.all_gather(np.stack(own))
            for name, *pieces in zip(names, *parts, strict=True):
                values += zip(self._kept.arrays[name], self._vector.unpack(np.concatenate(pieces)), strict=True)
        self._engine.write(values)

    def logs(self) -> Mapping[str, Any]:
        """See `Stepper.logs`."""
        if self._fallback is not None:
            return self._fallback.logs()
        if self._logs is not None:
            return self._logs
        if self._counted is not None:
            return self._engine.results_of(self._metrics.unpack(self._counted))
        return self._engine.logs()

    def end(self, retry: RetryOnMembershipChange) -> None:
        """See `ReplicaStepper.end`."""

    def admit(self) -> None:
        """See `ReplicaStepper.admit`. Nobody comes in."""

    def pooled(self) -> State:
        """See `ReplicaStepper.pooled`."""
        return {}

    def load_pooled(self, state: State) -> None:
        """See `ReplicaStepper.load_pooled`."""
