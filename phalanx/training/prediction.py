"""`predict`: each replica computes its part of every batch; all receive all outputs in sample order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from keras import tree

from phalanx.data import ShardedInput
from phalanx.data.dataset_elements import ElementStructure
from phalanx.errors import MembershipChangedError, UnsupportedError
from phalanx.keras_compat.model_state import set_mode
from phalanx.monitoring import timeline
from phalanx.runtime import progress
from phalanx.training import callback_hooks, progress_bar
from phalanx.training.checks.model_checks import check_kept_state
from phalanx.training.joint_batches import JointBatch, JointBatches, all_gather_rows, grouped_batches
from phalanx.training.replica import Replica, single_replica
from phalanx.training.replica_model import ReplicaModel

Array = np.ndarray[Any, Any]


def predict_on_replicas(
    replica_model: ReplicaModel, source: ShardedInput, callbacks: Any, *, has_batch_listeners: bool
) -> Any:
    """Return the outputs for all samples of a source, in their order, on every rank.

    Args:
        has_batch_listeners: Whether callbacks of any rank see single batches.
    """
    replica_model.model.stop_predicting = False
    set_mode(replica_model.model, training=False)
    callbacks.on_predict_begin()
    stops = bool(replica_model.model.stop_predicting)
    outputs = replica_model.run_over(
        source, lambda: _pass(replica_model, source, callbacks, has_batch_listeners, stops)
    )
    callbacks.on_predict_end()
    return outputs


def _pass(
    replica_model: ReplicaModel, source: ShardedInput, callbacks: Any, has_batch_listeners: bool, stops: bool
) -> Any:
    """Predict all batches, or one group if callbacks of any rank have already stopped the prediction (`stops`)."""
    model, engine, replica = replica_model.model, replica_model.engine, replica_model.replica
    has_hooks = callback_hooks.runs_batch_hooks(callbacks, "predict")
    bar = progress_bar.progress_bar(callbacks, replica.world_size)
    progress.report("predict")
    model.stop_predicting = stops = replica.any(stops)  # like Keras, which checks after each group
    batches = JointBatches(source, 0, replica)
    outputs = LocalOutputs.create(batches, replica_model)
    gathered: list[Any] = []  # as callbacks see them
    engine.begin()
    counts = LayerCounts(replica_model, outputs)
    try:
        for first, last, group in grouped_batches(batches, model.steps_per_execution):
            if has_hooks:
                callbacks.on_predict_batch_begin(first)
            for batch in group:
                timeline.current.enter("forward")
                with counts.counting(batch):
                    outputs.add(local_outputs(replica_model, batch, source.structure), batch)
                timeline.current.leave()
                if bar is not None:
                    bar.count(batch.global_size)
            if has_batch_listeners:
                gathered.append(outputs.gather())
            if has_hooks:
                callbacks.on_predict_batch_end(
                    last, {"outputs": gathered[-1] if has_batch_listeners else outputs.parts[-1]}
                )
            if stops or (has_batch_listeners and replica.any(model.stop_predicting)):
                break
        counts.merge()
    except MembershipChangedError:
        counts.reset()  # the prediction restarts
        raise
    finally:
        engine.end()
    if not outputs.is_whole and replica_model.deterministic is None:
        check_kept_state(model, replica)
    if outputs.parts:
        gathered.append(outputs.gather())
    if not gathered:
        raise ValueError("predict() got no data: the input has no batches.")
    if len(gathered) == 1:
        return gathered[0]
    return tree.map_structure_up_to(gathered[0], lambda *parts: np.concatenate(parts), *gathered)


def local_outputs(
    replica_model: ReplicaModel, batch: JointBatch, structure: ElementStructure = ElementStructure.PARTS
) -> Any:
    """Return the outputs for this rank's part of a batch; see `Engine.predict`."""
    replica_model.merge.set_batch_size(batch.global_size, batch.fixed_size)
    if replica_model.deterministic is None:
        return replica_model.engine.predict(batch.data, structure, batch.share)
    return replica_model.deterministic.predict(batch, structure)


class LayerCounts:
    """Counts of layers' metrics during a prediction, merged as if one process had predicted all samples.

    Args:
        replica_model: The model; its engine has begun.
        outputs: Outputs of the same prediction.
    """

    def __init__(self, replica_model: ReplicaModel, outputs: LocalOutputs) -> None:
        self._engine = replica_model.engine
        apart = not outputs.is_whole and replica_model.deterministic is None
        self._counts = apart and self._engine.predictions_update_metrics
        self._start = self._engine.metric_rules.values() if self._counts else []
        self._own_samples = self._all_samples = 0

    @contextmanager
    def counting(self, batch: JointBatch) -> Iterator[None]:
        """Predict this rank's part of a batch inside the context."""
        is_placeholder = self._counts and not batch.size
        before = self._engine.metric_rules.values() if is_placeholder else []
        yield
        if is_placeholder:
            self._engine.metric_rules.set_values(before)
        self._own_samples += batch.size
        self._all_samples += batch.global_size

    def merge(self) -> None:
        """Merge the counts after all batches are predicted; all ranks must call."""
        if self._counts and self._all_samples:
            self._engine.merge_metrics(self._own_samples / self._all_samples, self._start)

    def reset(self) -> None:
        """Reset the metrics to their state before the prediction."""
        if self._counts:
            self._engine.metric_rules.set_values(self._start)


class LocalOutputs:
    """This rank's predictions for its parts of batches, until the ranks gather them.

    Attributes:
        parts: A structure of arrays for each batch.
    """

    def __init__(self, replica: Replica) -> None:
        self.parts: list[Any] = []
        self._replica = replica
        self._sizes: list[tuple[int, ...]] = []  # for each batch, the number of samples on each rank

    @classmethod
    def create(cls, batches: JointBatches, replica_model: ReplicaModel) -> LocalOutputs:
        """Create the outputs for these batches, none of which has been taken. If an output has no row for each sample,
        or depends on other samples, every rank predicts whole batches."""
        if replica_model.replica.mesh_parts is not None:
            return cls(single_replica())  # one program computes all outputs, and all processes receive them
        first = batches.peek()
        if first is None or replica_model.can_predict_parts(first.data):
            return cls(replica_model.replica)
        # The same on all ranks: from here on all read whole batches, or none does.
        return cls(batches.switch_to_whole_batches())

    @property
    def is_whole(self) -> bool:
        """Whether every rank predicts all samples, or one program does."""
        return self._replica.is_alone

    def add(self, outputs: Any, batch: JointBatch) -> None:
        """Add the outputs for this rank's part of a batch; none if the part is a placeholder of one sample."""
        has_rows = batch.size or self._replica.is_alone
        self.parts.append(outputs if has_rows else tree.map_structure(lambda part: part[:0], outputs))
        self._sizes.append(batch.sizes)

    def gather(self) -> Any:
        """Return and clear the outputs for these batches from all ranks, in sample order. All ranks must call."""
        parts, sizes, self.parts, self._sizes = self.parts, self._sizes, [], []
        return tree.map_structure_up_to(parts[0], lambda *each: self._in_order(each, sizes), *parts)

    def _in_order(self, parts: Any, sizes: list[tuple[int, ...]]) -> Array:
        """Return all ranks' rows, batch by batch, in rank order within each batch."""
        # A scalar has no rows; Keras does not define its value for several batches either.
        columns = all_gather_rows(parts[0] if len(parts) == 1 else np.concatenate(parts), self._replica.communicator)
        if len(columns) == 1:
            return columns[0]
        rows = self._replica.communicator.all_gather(np.array([len(part) for part in parts], np.int64))
        starts = np.zeros(len(columns), int)
        pieces = []
        for batch, samples in zip(np.stack(rows, axis=1).tolist(), sizes, strict=True):
            _check_rows(batch, samples)
            for rank, count in enumerate(batch):
                pieces.append(columns[rank][starts[rank] : starts[rank] + count])
                starts[rank] += count
        return np.concatenate(pieces)


def _check_rows(rows: Sequence[int], samples: Sequence[int]) -> None:
    """Raise UnsupportedError unless each sample of a batch has the same number of rows of an output: one, or several if
    a model lengthens its first axis.

    Args:
        rows: Number of rows of the output on each rank.
        samples: Number of samples of the batch on each rank.
    """
    each, rest = divmod(sum(rows), sum(samples))
    if rest or not each or any(count != each * size for count, size in zip(rows, samples, strict=True)):
        raise UnsupportedError(
            f"An output of the model has {list(rows)} rows for {list(samples)} samples on the replicas, each of which "
            f"predicts its part of a batch: it is unknown which rows belong to which sample. Return one row for each "
            f"sample, or the same number for all; or predict in one process (a model outside of the strategy's scope)."
        )
