"""Merge of one training step: one all-reduce over everything that the ranks contribute to it.

With a compression, a `CompressedReducer` sums the gradients that it accepts, separately from the rest. Not every step
is merged: see `MergeMode`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np

from phalanx.arrays.tree import map_non_none
from phalanx.collectives.communicator import ReduceOp
from phalanx.compression import CompressedReducer, Compression
from phalanx.compression.base_compression import State, strip_prefix
from phalanx.engines.engine import Gather, GradientRows, Merge
from phalanx.engines.step_layout import EXTREMES, MergeWeight, StepLayout, neutral_value
from phalanx.errors import UnsupportedError
from phalanx.monitoring import timeline
from phalanx.runtime import progress
from phalanx.training.replica import Replica
from phalanx.training.steps.accumulation import GradientAccumulator
from phalanx.training.steps.float16_overflow import Float16Overflow
from phalanx.training.steps.gradient_rows import join_rows
from phalanx.training.steps.micro_batch_merge import MicroBatchMerge

Array = np.ndarray[Any, Any]

BUFFERS = 2
"""Number of buffers. While the backend's asynchronous update reads one, the next step writes to the other."""
MAX_LAYOUTS = 8
"""Number of layouts whose buffers are kept, each as large as the model: a step that leaves out layers at random has a
new layout each time."""
MAX_CACHED_SCALES = 1024
"""Number of cached scales by layout and share: in streams of varying batch sizes, the shares keep changing."""


class MergeMode(enum.Enum):
    """Mode of a step: which parts are merged over the ranks.

    MERGE: everything. UPDATE: everything, including what earlier steps have accumulated. ACCUMULATE_GRADIENTS:
    everything except gradients, which wait for the optimizer's update (`GradientAccumulator`). ACCUMULATE: only layer
    state; metric increments wait as well. LOCAL: nothing; this rank takes the step alone.
    """

    MERGE = "merge"
    UPDATE = "update"
    ACCUMULATE_GRADIENTS = "accumulate gradients"
    ACCUMULATE = "accumulate"
    LOCAL = "local"


class MergeBuffers:
    """Buffers that steps are merged into, used in turn, for the most recently used layouts."""

    def __init__(self) -> None:
        self._rings: dict[StepLayout, list[tuple[list[Array], list[Array]]]] = {}  # least recently used first

    def next(self, layout: StepLayout) -> tuple[list[Array], list[Array]]:
        """Return flat buffers, and views of the layout's arrays in them."""
        ring = self._rings.pop(layout, None)
        if ring is None:
            ring = [_buffers(layout) for _ in range(BUFFERS)]
            if len(self._rings) == MAX_LAYOUTS:
                del self._rings[next(iter(self._rings))]
        self._rings[layout] = ring
        # Reinserted above as the last entry, so the first entry is the least recently used.
        ring.append(ring.pop(0))
        return ring[-1]


class _Groups(NamedTuple):
    """Arrays of a layout by kind, as indices."""

    variable_ids: list[int]  # of the gradients
    gradients: list[int]
    compressed: list[int]  # a subset of the gradients
    counts: list[int]  # metric increments
    rest: list[int]
    extremes: list[int]


class _Accumulated(NamedTuple):
    """Gradients and metric increments that wait for the optimizer's update."""

    gradients: GradientAccumulator
    counts: GradientAccumulator


class StepMerge(Merge):
    """Merge of a step's arrays over the ranks.

    Args:
        compression: Gradient compression; None to send gradients unchanged.

    Attributes:
        loss_scale: Current scale of the loss, by which gradients are multiplied.
        accumulates: Whether some steps accumulate gradients; the same for all steps of a model.
        compresses: Whether gradients are compressed.
        overflow: Detector of gradient overflows if the loss has a dynamic scale; the same for all steps.
        micro_batches: Sums the contributions of a step's micro-batches, if steps are taken in micro-batches.
    """

    def __init__(self, replica: Replica, compression: Compression | None = None) -> None:
        self._replica = replica
        self.repeats_steps = replica.elastic is not None
        self.uses_micro_batches = self.once_per_step = replica.micro_batches is not None
        self._reducer = None if compression is None else CompressedReducer(compression)
        self._accumulated = _Accumulated(GradientAccumulator(), GradientAccumulator())
        # Set by the stepper for the duration of one step. Only the thread that trains merges.
        self._mode = MergeMode.MERGE
        self._buffers = MergeBuffers()
        # Both are computed once per layout: a step on a small model takes less than a millisecond, so this matters.
        self._scales: dict[tuple[StepLayout, float, bool], tuple[float, ...]] = {}
        self._groups: dict[StepLayout, _Groups] = {}
        self.loss_scale = 1.0
        self.accumulates = False
        self.compresses = compression is not None
        self.overflow: Float16Overflow | None = None
        self.micro_batches: MicroBatchMerge | None = None

    @property
    def is_unfused(self) -> bool:
        return self.accumulates or self.compresses or self.overflow is not None

    @property
    def gather(self) -> Gather | None:
        """None if gradients are accumulated: Keras sums their rows, too."""
        return None if self.accumulates else self._gather

    @contextmanager
    def in_mode(self, mode: MergeMode) -> Iterator[None]:
        """Merge steps in this mode inside the context."""
        former, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = former

    def __call__(self, layout: StepLayout, arrays: Sequence[Array], share: float) -> list[Array]:
        if self.micro_batches is not None and self._mode is not MergeMode.LOCAL:
            # Raises UpdateDeferred until the last micro-batch, so the notice is merged once per step.
            merged = self.micro_batches.merge(layout, arrays)
            if self._replica.notice is not None:
                self.merge_notice()
            return merged
        flats, views = self._buffers.next(layout)
        scales = self._scale(layout, share)
        if self._mode is MergeMode.LOCAL:
            _copy(arrays, views)
            timeline.current.enter("apply")
            return flats
        if not share:
            # The placeholder's values may be NaN, which a scale of 0 does not remove.
            arrays = [neutral_value(array, weight) for array, weight in zip(arrays, layout.weights, strict=True)]
        progress.enter("all_reduce")
        timeline.current.enter("merge")
        accumulates = self._mode in (MergeMode.ACCUMULATE, MergeMode.ACCUMULATE_GRADIENTS)
        has_accumulated = self._mode is MergeMode.UPDATE and (self._accumulated.gradients or self._accumulated.counts)
        if accumulates or has_accumulated or self._reducer or layout.has_extremes:
            self._merge_extremes(layout, arrays, views)
            self._merge_partly(layout, list(arrays), list(scales), views)
        else:
            self._all_reduce(arrays, scales, views)
        if self.overflow is not None:
            groups = self._groups_of(layout)
            self.overflow.mark_overflows(zip(groups.variable_ids, _select(groups.gradients, views), strict=True))
        progress.enter("update")
        timeline.current.enter("apply" if MergeWeight.GRADIENT in layout.weights else "metrics")
        return flats

    def _gather(self, rows: Sequence[GradientRows], share: float) -> list[GradientRows]:
        """See `Merge.gather`."""
        if self._mode is MergeMode.LOCAL:
            return list(rows)
        if self.micro_batches is not None:
            return self.micro_batches.gather(rows)
        return _gather_rows(self._replica, rows, share)

    def _all_reduce(self, arrays: Sequence[Array], scales: tuple[float, ...], views: Sequence[Array]) -> None:
        """Sum over the ranks, and merge the preemption notice along with it."""
        notice = self._replica.notice
        if notice is None:
            self._replica.all_reduce(arrays, scale=scales, out=views)
        else:
            arrays, scales, views = notice.add_to_merge(arrays, scales, views)
            self._replica.all_reduce(arrays, scale=scales, out=views)
            notice.read_merge()

    def _merge_extremes(self, layout: StepLayout, arrays: Sequence[Array], views: Sequence[Array]) -> None:
        """Merge maxima and minima, in every mode except LOCAL: the next step depends on them."""
        extremes = self._groups_of(layout).extremes
        for op, weight in ((ReduceOp.MAX, MergeWeight.MAX), (ReduceOp.MIN, MergeWeight.MIN)):
            chosen = [i for i in extremes if layout.weights[i] is weight]
            if chosen:
                self._replica.communicator.all_reduce(_select(chosen, arrays), op, out=_select(chosen, views))

    def merge_notice(self) -> None:
        """Merge only the preemption notice."""
        zero = [np.zeros(1, np.float32)]
        self._all_reduce(zero, (1.0,), [np.empty_like(zero[0])])

    def all_reduce(self, local: Array, share: float) -> Array:
        if self.micro_batches is not None:
            return self.micro_batches.all_reduce(local)
        if self._mode is MergeMode.LOCAL:
            return local / np.float32(share)  # as if all other ranks had the same total per sample
        return self._replica.all_reduce([local if share else np.zeros_like(local)])[0]

    def all_gather(self, local: Array, share: float) -> tuple[Array, int]:
        if self.uses_micro_batches:
            raise UnsupportedError(
                "CommunicationOptions(deterministic=True): a loss over the global batch (OverGlobalBatch, Dice, ...) "
                "needs the predictions of all micro-batches at once, and they are computed one after the other. Use a "
                "loss with one value for each sample, or leave out deterministic=True."
            )
        if self._mode is MergeMode.LOCAL:
            return local, 0
        progress.enter("all_gather")
        parts = self._replica.communicator.all_gather(local if share else local[:0])
        return np.concatenate(parts), sum(len(part) for part in parts[: self._replica.rank])

    def merge_accumulated(self, variables: Sequence[Any]) -> list[Array | None]:
        """Return the accumulated gradients of these variables, summed over all ranks, and clear them; None for a
        variable without a gradient. All ranks must call."""
        own = [self._accumulated.gradients.get(id(variable)) for variable in variables]
        merged = map_non_none(lambda present: self._replica.all_reduce(present) if present else [], own)
        self._accumulated.gradients.clear()
        return merged

    def reset_counts(self) -> None:
        """Discard what metrics have counted since the last merge, because they were reset."""
        self._accumulated.counts.clear()

    def reset_compression(self) -> None:
        """Discard the state that the compression has kept from earlier steps."""
        if self._reducer is not None:
            self._reducer.load({})

    def combined_state(self) -> dict[str, Array]:
        """Return the state that merges keep between steps, combined over all ranks; all ranks must call."""
        if self._reducer is None:
            return {}
        pooled = self._reducer.pooled(self._replica.communicator)
        return {f"compression/{name}": array for name, array in pooled.items()}

    def load_combined(self, state: State) -> None:
        """Continue from what `combined_state` returned, with the current ranks."""
        if self._reducer is not None:
            self._reducer.load_pooled(strip_prefix("compression/", state), self._replica.world_size)

    def synchronize(self) -> None:
        """Synchronize the shared part of the state with the chief's; all ranks must call."""
        if self._reducer is not None:
            self._reducer.synchronize(self._replica.communicator)

    def _merge_partly(
        self, layout: StepLayout, arrays: list[Array], scales: list[float], views: Sequence[Array]
    ) -> None:
        groups, mode, loss_scale = self._groups_of(layout), self._mode, self.loss_scale
        gradients, counts = (_select(group, arrays) for group in (groups.gradients, groups.counts))
        factors, weights = (_select(group, scales) for group in (groups.gradients, groups.counts))
        # Below: what is compressed, what is merged uncompressed, and what is only added to this rank's sums. `arrays`
        # and `scales` are local lists, so their items may be replaced. State is merged at every step: the state of a
        # rank with no samples, or with different ones, is not the job's.
        merged = list(groups.rest)
        if mode is not MergeMode.ACCUMULATE:
            merged = [*groups.counts, *merged]
            if mode is not MergeMode.MERGE and self._accumulated.counts:
                whole = self._accumulated.counts.plus_accumulated(range(len(counts)), counts, weights)
                _replace(groups.counts, whole, arrays, scales)
        if mode in (MergeMode.MERGE, MergeMode.UPDATE):
            merged = [*(i for i in groups.gradients if i not in groups.compressed), *merged]
            if mode is MergeMode.UPDATE and self._accumulated.gradients:
                whole = self._accumulated.gradients.plus_accumulated(
                    groups.variable_ids, gradients, factors, loss_scale=loss_scale
                )
                _replace(groups.gradients, whole, arrays, scales)
            if self._reducer is not None and groups.compressed:
                self._reducer.all_reduce(
                    self._replica.communicator,
                    *(_select(groups.compressed, of) for of in (arrays, scales, views)),
                    unit=loss_scale,
                    owner=layout.owners,
                )
        if merged or self._replica.notice is not None:
            self._all_reduce(_select(merged, arrays), tuple(_select(merged, scales)), _select(merged, views))
        # Nothing below can fail, so the state kept between steps may change.
        if self._reducer is not None:
            self._reducer.commit()
        if mode in (MergeMode.ACCUMULATE, MergeMode.ACCUMULATE_GRADIENTS):
            # The optimizer accumulates zeros, which change nothing, until the update adds the sums.
            self._accumulated.gradients.add(groups.variable_ids, gradients, factors, loss_scale=loss_scale)
            _clear(_select(groups.gradients, views))
        elif mode is MergeMode.UPDATE:
            # As in Keras: accumulated gradients are dropped if this step has no gradient.
            self._accumulated.gradients.clear()
        if mode is MergeMode.ACCUMULATE:
            self._accumulated.counts.add(range(len(counts)), counts, weights)
            _clear(_select(groups.counts, views))
        elif mode is not MergeMode.MERGE:
            self._accumulated.counts.clear()

    def _groups_of(self, layout: StepLayout) -> _Groups:
        groups = self._groups.get(layout)
        if groups is None:

            def indices(*weights: MergeWeight) -> list[int]:
                return [i for i, weight in enumerate(layout.weights) if weight in weights]

            gradients, reducer = indices(MergeWeight.GRADIENT), self._reducer
            groups = self._groups[layout] = _Groups(
                variable_ids=[layout.owners[i] if layout.owners else i for i in gradients],
                gradients=gradients,
                compressed=[
                    i
                    for i in gradients
                    if reducer is not None and reducer.compression.takes(layout.shapes[i], np.dtype(layout.dtypes[i]))
                ],
                counts=indices(MergeWeight.ONE),
                rest=indices(MergeWeight.SHARE, MergeWeight.FIRST),
                extremes=indices(*EXTREMES),
            )
        return groups

    def _scale(self, layout: StepLayout, share: float) -> tuple[float, ...]:
        key = (layout, share, self._replica.is_chief)
        scale = self._scales.get(key)
        if scale is None:
            # `is_chief` is part of the key: in elastic jobs another rank may become chief.
            first = 1.0 if self._replica.is_chief else 0.0
            factor_of = {
                MergeWeight.GRADIENT: share,
                MergeWeight.SHARE: share,
                MergeWeight.ONE: 1.0,
                MergeWeight.FIRST: first,
                **dict.fromkeys(EXTREMES, 1.0),
            }
            if len(self._scales) == MAX_CACHED_SCALES:
                self._scales.clear()
            scale = self._scales[key] = tuple(factor_of[weight] for weight in layout.weights)
        return scale


def _gather_rows(replica: Replica, rows: Sequence[GradientRows], share: float) -> list[GradientRows]:
    """See `Merge.gather`."""
    progress.enter("all_reduce")
    timeline.current.enter("merge")
    all_gather = replica.communicator.all_gather
    found = []
    for numbers, gradients, is_batch_independent in rows:
        own = len(numbers) if share else 0  # a placeholder batch counts nowhere
        weighted = gradients[:own] * gradients.dtype.type(share)
        numbers_of, weighted_of = all_gather(numbers[:own]), all_gather(weighted)
        found.append(join_rows(numbers_of, weighted_of, is_batch_independent=is_batch_independent))
    return found


class CustomLoopMerge:
    """Merge of gradients over the ranks outside of `fit`, with or without compression."""

    def __init__(self, replica: Replica, compression: Compression | None = None) -> None:
        self._replica = replica
        self._merge = None if compression is None else StepMerge(replica, compression)
        self._generation = replica.generation

    def function_for(self, variables: Sequence[Any], scale: Any = None) -> Callable[[Sequence[Array]], list[Array]]:
        """Return a function that sums gradients of these variables. All ranks must call it with the gradients of the
        same variables, in the same order.

        Args:
            variables: The weights.
            scale: The variable by which the loss is multiplied at the time of the call; None if it is not scaled.
        """

        def merge(gradients: Sequence[Array]) -> list[Array]:
            if self._merge is None:
                return self._replica.all_reduce(gradients)
            # A member that has joined has no compression state, and the others' may include steps that were undone.
            if self._generation != self._replica.generation:
                self._generation = self._replica.generation
                self._merge.reset_compression()
            # Residuals of earlier gradients are kept in the unit of the loss.
            self._merge.loss_scale = 1.0 if scale is None else float(keras.ops.convert_to_numpy(scale))
            layout = StepLayout.of(gradients, [MergeWeight.GRADIENT] * len(gradients), variables)
            return [np.array(array) for array in layout.unpack(self._merge(layout, gradients, 1.0))]

        return merge

    def gather(self, rows: Sequence[GradientRows]) -> list[GradientRows]:
        """Gather single-row gradients of all ranks; all ranks must call. See `Merge.gather`."""
        return _gather_rows(self._replica, rows, 1.0)


def _select(indices: Iterable[int], values: Sequence[Any]) -> list[Any]:
    return [values[index] for index in indices]


def _replace(indices: Iterable[int], whole: Iterable[Array], arrays: list[Array], scales: list[float]) -> None:
    """Replace some arrays by sums that already include their scales."""
    for index, array in zip(indices, whole, strict=True):
        arrays[index], scales[index] = array, 1.0


def _copy(sources: Iterable[Array], targets: Iterable[Array]) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


def _clear(arrays: Iterable[Array]) -> None:
    for array in arrays:
        array.fill(0)


def _buffers(layout: StepLayout) -> tuple[list[Array], list[Array]]:
    flats = layout.allocate()
    return flats, layout.unpack(flats)
