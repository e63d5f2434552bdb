"""Probe that determines before the first step how a program's losses combine over the parts of a batch.

A loss function that returns one number may be a mean over the samples, their sum, a ratio of two sums, or may relate
the samples to each other; nothing declares which. So one process computes the losses of one small batch, and of two
unequal parts of it as two ranks would, and compares them. Losses that merge to the loss of the whole batch need
nothing. A sum is marked as one (`global_losses.mark_as_sum`). Anything else is an error.

Keras's own losses and layers are known and not probed. The probe computes eagerly, on a few samples, in a
`StatelessScope`, so that no variable and no seed changes. Losses are computed from fixed predictions, so dropout has no
effect. Code that draws its own random numbers cannot be compared.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.engines.local_ranks import StepsDifferError, TooManyCollectivesError
from phalanx.keras_compat.global_batch.global_losses import mark_added_losses, mark_as_sum
from phalanx.keras_compat.keras_internals import get_keras_mask, set_keras_mask
from phalanx.keras_compat.model_state import compiled_losses, overrides
from phalanx.keras_compat.observation.deterministic_steps import inference_batch_norm
from phalanx.keras_compat.observation.loss_calls import recorded_additions, recorded_calls
from phalanx.training.checks.loss_combination import (
    SUMS,
    Combination,
    combination_of,
    combination_of_values,
    compute_as_ranks,
    is_close,
    marked_as_sums,
    tolerance_of,
)
from phalanx.training.checks.program_losses import computes_own_loss, is_known, layers_adding_losses, unknown_losses
from phalanx.training.checks.trial_samples import MAX_PART_SAMPLES, part_size, values_per_sample
from phalanx.training.checks.trial_targets import (
    smaller_copies,
    spread_outputs,
    with_largest,
    with_reflected_rows,
    with_zeros,
)

ROWS = 12
"""Number of samples from which losses are computed; the first part is a third of them."""

_REFUSED = (Combination.OTHER, Combination.UNSCALED_SUM)

logger = logging.getLogger(__name__)


class Findings(NamedTuple):
    """Findings of the probe.

    Attributes:
        is_sum: Whether each loss is a sum over the batch; False for a mean and for a constant, None if unknown.
            `_describe` explains the keys.
        error: Reason why replicas cannot compute the losses as one process does; empty if they can.
    """

    is_sum: dict[str, bool | None]
    error: str = ""

    @property
    def sums(self) -> set[str]:
        """Losses that steps merge as sums."""
        return {loss for loss, is_sum in self.is_sum.items() if is_sum}

    def conflicts_with(self, other: Findings) -> list[str]:
        """Return the losses that combine in one way here and in another way there."""
        common = self.is_sum.keys() & other.is_sum
        return sorted(loss for loss in common if {self.is_sum[loss], other.is_sum[loss]} == {True, False})

    def updated(self, later: Findings) -> Findings:
        """Add what later findings, which must not conflict, say about losses that are unknown here."""
        known = {loss: is_sum for loss, is_sum in later.is_sum.items() if is_sum is not None}
        return Findings({**later.is_sum, **self.is_sum, **known})


_COMPUTE_LOSS = "compute_loss"


def _compiled(index: int) -> str:
    return f"compiled {index}"


def _added_by(layer: int) -> str:
    """Prefix of the keys of a layer's losses; the number of the loss follows."""
    return f"added by {layer}: "


def _describe(model: Any, loss: str) -> str:
    """Describe what a key of `Findings.is_sum` refers to."""
    if loss == _COMPUTE_LOSS:
        return f"What compute_loss of {type(model).__name__} returns"
    for index, compiled in enumerate(compiled_losses(model)):
        if loss == _compiled(index):
            return f"The loss {compiled.name!r} of {model.name!r}"
    layer = next(each for index, each in enumerate(model._flatten_layers()) if loss.startswith(_added_by(index)))
    return f"What the layer {layer.name!r} of {model.name!r} passes to add_loss"


def conflict_error(model: Any, loss: str) -> str:
    """Message for a loss that `conflicts_with` returns."""
    return (
        f"{_describe(model, loss)} is a sum over the batch for some data, and a mean for others (with sample weights, "
        f"or where it is clipped), and replicas merge it in one way. Return a mean over the samples for all."
    )


def needs_probing(model: Any) -> bool:
    """Whether `probe` has anything to determine; the same on all ranks."""
    return bool(unknown_losses(model) or layers_adding_losses(model) or computes_own_loss(model))


def record_findings(model: Any, findings: Findings) -> None:
    """Make the findings available to training steps."""
    for index, loss in enumerate(compiled_losses(model)):
        mark_as_sum(loss, is_sum=_compiled(index) in findings.sums)
    for index, layer in enumerate(model._flatten_layers()):
        if kinds := [kind for loss, kind in findings.is_sum.items() if loss.startswith(_added_by(index))]:
            mark_added_losses(layer, kinds)
    mark_as_sum(model, is_sum=_COMPUTE_LOSS in findings.sums)


def probe(model: Any, x: Any, y: Any, sample_weight: Any, *, replicas: int) -> Findings:
    """Probe the model on this process alone.

    Args:
        model: The built model.
        x, y, sample_weight: Arrays of a local batch, as Keras's steps receive them.
        replicas: Number of replicas that share the global batch.
    """
    for each in (*compiled_losses(model), model):
        mark_as_sum(each, is_sum=False)  # a recompiled loss may already be noted
    own = len(leaves(x)[0])
    # At least three samples, one in the first part and two in the second, so that the parts differ in size.
    few = _Probe(model, x, y, sample_weight, min(own, ROWS) if own > 2 else 3)
    found = few.find()
    if found.error:
        return found
    # Repeat with as many samples in the first part as a replica has.
    rows = 3 * part_size(own, 3, replicas, few.values_per_row)
    return _merge_findings(model, found, _Probe(model, x, y, sample_weight, rows).find()) if rows > few.rows else found


def _merge_findings(model: Any, found: Findings, later: Findings) -> Findings:
    """Combine the findings for some samples with later findings for others."""
    if error := found.error or later.error:
        return Findings({}, error)
    if conflicts := found.conflicts_with(later):
        return Findings({}, conflict_error(model, conflicts[0]))
    return found.updated(later)


class _ProgramError(Exception):
    """Raised from an error in the program's own code."""


@contextmanager
def _program_code() -> Iterator[None]:
    """Context for running code of the program."""
    try:
        yield
    except Exception as error:
        raise _ProgramError from error


class _Part(NamedTuple):
    """Some rows of the batch, with their predictions."""

    x: Any
    y: Any
    sample_weight: Any
    y_pred: Any
    rows: int

    def cut(self, start: int, stop: int) -> _Part:
        def cut_rows(each: Any) -> Any:
            if each is None:
                return None
            rows = each[start:stop]
            if (mask := get_keras_mask(each)) is not None:  # Keras's losses skip time steps by this mask
                set_keras_mask(rows, mask[start:stop])
            return rows

        x, y, sample_weight, y_pred = (tree.map_structure(cut_rows, each) for each in self[:4])
        return _Part(x, y, sample_weight, y_pred, stop - start)


class _Probe:
    """One probe of one model.

    Attributes:
        rows: Number of samples.
        values_per_row: Number of values per sample in the largest array.
    """

    def __init__(self, model: Any, x: Any, y: Any, sample_weight: Any, rows: int) -> None:
        self._model = model
        self.rows = rows
        self._num_originals = own = min(len(leaves(x)[0]), rows, MAX_PART_SAMPLES)
        # Repeating identical samples would reveal nothing about relations between them.
        self._repeats = own < rows
        self._has_row_outputs = True  # whether outputs have a row for each sample
        chosen = np.resize(np.arange(own), rows)
        x, y, sample_weight = (
            map_leaves(lambda array: np.asarray(array)[chosen], each) for each in (x, y, sample_weight)
        )
        if self._repeats:
            x = map_leaves(partial(smaller_copies, size=own), x)
        self.values_per_row = values_per_sample((x, y, sample_weight))
        self._data = map_leaves(ops.convert_to_tensor, (x, y, sample_weight))

    def find(self) -> Findings:
        """Return the findings; empty if the program cannot compute losses of these samples."""
        try:
            return self._find()
        except (_ProgramError, StepsDifferError, TooManyCollectivesError) as error:
            # A loss or layer may need what only a step provides. If the program is wrong, the step will show it.
            text = "The losses of %r cannot be computed of parts of %d samples: %r"
            logger.info(text, self._model.name, self.rows, error.__cause__ or error)
            return Findings({})

    def _find(self) -> Findings:
        with _without_gradients():
            found = self._probe_added_losses()
            if found.error or not (unknown_losses(self._model) or computes_own_loss(self._model)):
                return found
            for whole in self._batches():
                found = _merge_findings(self._model, found, self._probe_losses(whole))
                if found.error:
                    break
            return found

    def _batches(self) -> Iterator[_Part]:
        """Yield the batch unchanged; then with some targets set to zero, as in padding, which exposes a ratio of sums
        if the parts' sums differ; then with some nonzero, because a ratio is NaN if no target of a part is positive."""
        x, y, sample_weight = self._data
        y_pred, _ = self._forward(map_leaves(lambda each: each[: self._num_originals], x), training=False)
        largest = max(int(np.prod(each.shape)) for each in tree.flatten(y_pred))
        self.values_per_row = max(self.values_per_row, largest // self._num_originals)
        self._has_row_outputs = all(
            len(each.shape) and each.shape[0] == self._num_originals for each in tree.flatten(y_pred)
        )
        if self._repeats:
            y_pred = (
                tree.map_structure(partial(spread_outputs, rows=self.rows), y_pred)
                if self._has_row_outputs
                else self._forward(x, training=False)[0]
            )
        yield _Part(x, y, sample_weight, y_pred, self.rows)
        # Zeros in each part in turn: one part's loss may happen to equal the mean of all.
        first = slice(self.rows // 3)
        yield _Part(x, map_leaves(partial(with_zeros, rows=first, step=2), y), sample_weight, y_pred, self.rows)
        others = slice(self.rows // 3, self.rows)
        yield _Part(x, map_leaves(partial(with_zeros, rows=others, step=3), y), sample_weight, y_pred, self.rows)
        both = map_leaves(partial(with_largest, starts=(0, self.rows // 3)), y)
        yield _Part(x, both, sample_weight, y_pred, self.rows)

    def _probe_losses(self, whole: _Part) -> Findings:
        model, compiled = self._model, compiled_losses(self._model)
        parts = [self._cut_part(whole, 0, self.rows // 3), self._cut_part(whole, self.rows // 3, self.rows)]
        compute = self._compute_loss if computes_own_loss(model) else _compute_compiled
        rows = [part.rows for part in parts]
        calls = [
            recorded_calls(model, unknown_losses(model), partial(compute, model, part)) for part in (whole, *parts)
        ]
        found = Findings({})
        # Calls are matched by their order. If a part calls other losses than the batch, nothing can be concluded.
        if len({len(each) for each in calls}) == 1:
            for of_whole, *of_parts in zip(*calls, strict=True):
                loss = of_whole[0]
                if is_known(loss):
                    continue
                verdict = combination_of(_call, of_whole, of_parts, rows, loss)
                index = next((i for i, each in enumerate(compiled) if each is loss), None)
                if verdict in _REFUSED or (index is None and verdict is Combination.SUM):
                    return Findings({}, _error_message(f"The loss {loss.name!r} of {model.name!r}", verdict))
                if index is not None:  # several outputs may share one loss
                    found = _merge_findings(model, found, Findings({_compiled(index): _is_sum(verdict)}))
        if computes_own_loss(model) and not found.error:
            with marked_as_sums([loss for index, loss in enumerate(compiled) if _compiled(index) in found.sums]):
                verdict = combination_of(partial(self._compute_loss, model), whole, parts, rows, model)
            if verdict in _REFUSED or (verdict is Combination.SUM and overrides(model, "train_step")):
                return Findings({}, _error_message(_describe(model, _COMPUTE_LOSS), verdict))
            found = found.updated(Findings({_COMPUTE_LOSS: _is_sum(verdict)}))
        return found

    def _cut_part(self, whole: _Part, start: int, stop: int) -> _Part:
        if self._has_row_outputs:
            return whole.cut(start, stop)
        part = whole._replace(y_pred=None).cut(start, stop)
        return part._replace(y_pred=self._forward(part.x, training=False)[0])

    def _compute_loss(self, model: Any, part: _Part) -> Any:
        with keras.StatelessScope(), _program_code():
            return model._compute_loss(
                x=part.x, y=part.y, y_pred=part.y_pred, sample_weight=part.sample_weight, training=True
            )

    def _forward(self, x: Any, *, training: bool, other_seeds: bool = False) -> tuple[Any, list[tuple[Any, Any]]]:
        """Return the predictions, and the losses that layers add on the way, with their layers."""
        model = self._model
        seeds = [v for v in model.non_trainable_variables if "seed_generator_state" in v.path] if other_seeds else []
        mapping = [(seed, ops.cast(seed.value + 1, seed.dtype)) for seed in seeds]
        with (
            recorded_additions() as added,
            keras.StatelessScope(state_mapping=mapping),
            inference_batch_norm(),  # batch normalization is over all replicas, or local on purpose
            _program_code(),
        ):
            y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
        return y_pred, added

    def _probe_added_losses(self) -> Findings:
        """Probe added losses with the samples, and with some changed: all samples may take one path in the model."""
        if not layers_adding_losses(self._model):
            return Findings({})
        x = self._data[0]
        found = self._probe_added_losses_for(x)
        if found.error:
            return found
        try:
            changed = self._probe_added_losses_for(map_leaves(with_reflected_rows, x))
        except _ProgramError as error:
            logger.info("Layers of %r do not know changed samples: %r", self._model.name, error.__cause__)
            return found
        return _merge_findings(self._model, found, changed)

    def _probe_added_losses_for(self, x: Any) -> Findings:
        """Determine how added losses combine for these inputs; unknown for losses that depend on random numbers."""
        cut = self.rows // 3
        parts = [map_leaves(lambda each: each[:cut], x), map_leaves(lambda each: each[cut:], x)]
        rows = [cut, self.rows - cut]

        def added(part: Any, other_seeds: bool = False) -> list[tuple[Any, Any]]:
            return self._forward(part, training=True, other_seeds=other_seeds)[1]

        whole, again = (
            compute_as_ranks(partial(added, other_seeds=seeds), [x], [self.rows])[0] for seeds in (False, True)
        )
        of_parts = compute_as_ranks(added, parts, rows)
        layers = self._model._flatten_layers()
        found: dict[str, bool | None] = {}
        if len({len(each) for each in (whole, again, *of_parts)}) > 1:
            return Findings(found)
        so_far = Counter[str]()
        for (layer, value), (_, other), *of in zip(whole, again, *of_parts, strict=True):
            own, numbers = float(value), [float(each[1]) for each in of]
            name = _added_by(next(i for i, each in enumerate(layers) if each is layer))
            loss = f"{name}{so_far[name]}"
            so_far[name] += 1
            is_random = not is_close(own, float(other), own)
            # A different value with other seeds means that it depends on random numbers, which differ between parts.
            tolerance = tolerance_of(layer.compute_dtype)
            verdict = Combination.UNKNOWN if is_random else combination_of_values(own, numbers, rows, tolerance)
            if verdict is Combination.SUM and is_close(numbers[0], numbers[1], own):
                # Not a sum over samples, because the parts differ in size, but a term divided by the number of
                # replicas. Replicas without samples in the last batch do not count, and their share would be missing.
                verdict = Combination.OTHER
            if verdict is Combination.OTHER:
                return Findings({}, _error_message(_describe(self._model, loss), verdict))
            found[loss] = _is_sum(verdict)
        return Findings(found)


def _is_sum(verdict: Combination) -> bool | None:
    return None if verdict is Combination.UNKNOWN else verdict is Combination.SUM


def _call(recorded: tuple[Any, ...]) -> Any:
    loss, *arguments = recorded
    with _program_code():
        return loss(*arguments)


def _compute_compiled(model: Any, part: _Part) -> Any:
    # Leaves the running means of single losses unchanged: the program may read them before it takes a step.
    with keras.StatelessScope(), _program_code():
        return model._compile_loss(part.y, part.y_pred, part.sample_weight)


def _error_message(what: str, verdict: Combination) -> str:
    if verdict in SUMS:
        return (
            f"{what} is the sum over the batch as one number, which the replicas would average. Return a mean over the "
            f"samples; or apply a keras.losses.Loss with reduction='sum', which is summed over the replicas."
        )
    return (
        f"{what} is neither a mean nor a sum over samples: for a batch, it differs from what follows from those "
        f"of its parts. So it relates the samples to each other, is a ratio of two sums, such as sum(loss * mask) / "
        f"sum(mask), or is divided by the number of replicas; and replicas that each see a part of a batch would train "
        f"with another loss. Compile a loss with phalanx.losses.OverGlobalBatch(loss), which computes it over the "
        f"batches of all replicas together; or, for a ratio, return one value for each sample and pass the mask as "
        f"sample_weight."
    )


def _without_gradients() -> Any:
    if keras.backend.backend() != "torch":
        return nullcontext()
    import torch

    return torch.no_grad()
