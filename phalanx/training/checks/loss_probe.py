"""Finds out before the first step how the losses of a program combine over the parts of a batch.

A loss function that returns one number may be a mean over the samples, their sum, a ratio of two sums, or relate the
samples to each other, and nothing says which. So one process computes the losses of one small batch, and of two unequal
parts of it as two ranks would, and compares. What merges to the loss of the whole batch needs nothing. A sum is noted
as one (`global_losses.note_sum`). Anything else is an error.

Nothing is computed where nothing is to be found out: Keras's own losses are known, and so are Keras's own layers. All
is computed eagerly, of a few samples, in a `StatelessScope`, so that no variable and no seed changes; a loss is
computed of fixed predictions, so that dropout has no say. What draws random numbers of its own cannot be compared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.keras_compat.global_batch.global_losses import note_added, note_sum
from phalanx.keras_compat.keras_internals import get_keras_mask, set_keras_mask
from phalanx.keras_compat.model_state import compiled_losses, overrides
from phalanx.keras_compat.observation.loss_calls import recorded_additions, recorded_calls
from phalanx.keras_compat.observation.trial_conditions import collected_statistics
from phalanx.training.checks.loss_combination import (
    SUMS,
    Combination,
    combination_of,
    combination_of_values,
    compute_as_ranks,
    is_close,
    noted_as_sums,
    tolerance_of,
)
from phalanx.training.checks.program_losses import adding_layers, computes_own_loss, is_known, unknown_losses
from phalanx.training.checks.tried_samples import MOST, part_size, values_per_sample
from phalanx.training.checks.tried_targets import (
    smaller_copies,
    spread_outputs,
    with_largest,
    with_reflected_rows,
    with_zeros,
)

ROWS = 12
"""Samples of the batch that losses are computed of; a third of them is the first part."""

logger = logging.getLogger(__name__)


class Findings(NamedTuple):
    """The findings of the probe.

    Attributes:
        sums: indices of the compiled losses that are one sum over the batch.
        added: of each loss that a layer adds, in their order, by the layer's index: whether it is a sum over the batch;
            False for a mean and for what is the same for every batch, None where nothing can be said.
        is_sum: whether that is what `compute_loss` returns.
        error: what no number of replicas can compute as one process does; empty if there is none.
        means: indices of the compiled losses that are known to be means over the samples.
    """

    sums: list[int]
    added: dict[str, list[bool | None]]
    is_sum: bool = False
    error: str = ""
    means: tuple[int, ...] = ()

    @property
    def merges(self) -> tuple[Any, ...]:
        """What of it steps are compiled with."""
        return self.sums, {layer: [bool(kind) for kind in kinds] for layer, kinds in self.added.items()}, self.is_sum

    def conflicts_with(self, other: Findings) -> bool:
        """Whether a loss combines in one way here, and in another there."""
        added = [
            pair
            for layer in self.added.keys() & other.added
            for pair in zip(self.added[layer], other.added[layer], strict=False)
        ]
        if any(None not in pair and pair[0] is not pair[1] for pair in added):
            return True
        return not {*self.sums}.isdisjoint(other.means) or not {*other.sums}.isdisjoint(self.means)

    def updated(self, later: Findings) -> Findings:
        """With what other findings know of losses of which nothing could be said, as they were zero."""
        added = {
            layer: [old if new is None else new for old, new in zip(kinds, later.added[layer], strict=True)]
            if len(kinds) == len(later.added.get(layer, ()))
            else kinds
            for layer, kinds in self.added.items()
        }
        sums = sorted({*self.sums, *later.sums})
        means = tuple(sorted({*self.means, *later.means}.difference(sums)))
        return Findings(sums, added, self.is_sum or later.is_sum, means=means)


def has_open_questions(model: Any) -> bool:
    """Whether `probe` would find out anything; the same on all ranks."""
    return bool(unknown_losses(model) or adding_layers(model) or computes_own_loss(model))


def note(model: Any, findings: Findings) -> None:
    """Let steps use what was found out."""
    losses, layers = compiled_losses(model), model._flatten_layers()
    for index, loss in enumerate(losses):
        note_sum(loss, is_sum=index in findings.sums)
    for number, kinds in findings.added.items():
        note_added(layers[int(number)], kinds)
    note_sum(model, is_sum=findings.is_sum)


def probe(model: Any, x: Any, y: Any, sample_weight: Any, *, replicas: int) -> Findings:
    """Find out; computes on this process alone.

    Args:
        model: built.
        x, y, sample_weight: arrays of a local batch, as Keras's steps get them.
        replicas: that share the global batch.
    """
    for each in (*compiled_losses(model), model):
        note_sum(each, is_sum=False)  # a loss that is compiled again may be noted already
    own = len(leaves(x)[0])
    # At least three samples, one in the first part and two in the other, so that these differ in size.
    few = _Probe(model, x, y, sample_weight, min(own, ROWS) if own > 2 else 3)
    found = few.find()
    if found is not None and found.error:
        return found
    # Then again with as many samples in the first part as a replica has.
    rows = 3 * part_size(own, 3, replicas, few.values_per_row)
    later = _Probe(model, x, y, sample_weight, rows).find() if rows > few.rows else None
    if found is None or (later is not None and later.error):
        return later or Findings([], {})
    return found if later is None else found.updated(later)


class _ProgramError(Exception):
    """The program's own code has raised its cause."""


@contextmanager
def _program() -> Iterator[None]:
    """A context in which code of the program runs."""
    try:
        yield
    except Exception as error:
        raise _ProgramError from error


class _Part(NamedTuple):
    """Some rows of the batch, and their predictions."""

    x: Any
    y: Any
    sample_weight: Any
    y_pred: Any
    rows: int

    def of(self, start: int, stop: int) -> _Part:
        def cut(each: Any) -> Any:
            if each is None:
                return None
            rows = each[start:stop]
            if (mask := get_keras_mask(each)) is not None:  # by which Keras's losses leave out steps of a sequence
                set_keras_mask(rows, mask[start:stop])
            return rows

        x, y, sample_weight, y_pred = (tree.map_structure(cut, each) for each in self[:4])
        return _Part(x, y, sample_weight, y_pred, stop - start)


class _Probe:
    """One probe of one model.

    Attributes:
        rows: number of samples.
        values_per_row: of the largest array.
    """

    def __init__(self, model: Any, x: Any, y: Any, sample_weight: Any, rows: int) -> None:
        self._model = model
        self.rows = rows
        self._own = own = min(len(leaves(x)[0]), rows, MOST)
        # The same samples again would say nothing of what relates them.
        self._repeats = own < rows
        self._by_rows = True  # whether outputs have a row for each sample
        chosen = np.resize(np.arange(own), rows)
        x, y, sample_weight = (
            map_leaves(lambda array: np.asarray(array)[chosen], each) for each in (x, y, sample_weight)
        )
        if self._repeats:
            x = map_leaves(partial(smaller_copies, size=own), x)
        self.values_per_row = values_per_sample((x, y, sample_weight))
        self._data = map_leaves(ops.convert_to_tensor, (x, y, sample_weight))

    def find(self) -> Findings | None:
        """The findings; None if the program cannot compute losses of these samples."""
        try:
            return self._find()
        except _ProgramError as error:
            # A loss or layer may need what only a step has. Whatever is wrong with the program shows there.
            text = "The losses of %r cannot be computed of parts of %d samples: %r"
            logger.info(text, self._model.name, self.rows, error.__cause__)
            return None

    def _find(self) -> Findings:
        with _without_gradients():
            found = self._added()
            if found.error or not (unknown_losses(self._model) or computes_own_loss(self._model)):
                return found
            for whole in self._batches():
                of_batch = self._of_losses(whole)
                if of_batch.error:
                    return of_batch
                found = found.updated(of_batch)
            return found

    def _batches(self) -> Iterator[_Part]:
        """The batch, and it with some targets zero, as padding is: a ratio of sums shows where the parts' differ. Then
        with some that are not: where no target of a part is positive, a ratio is no number."""
        x, y, sample_weight = self._data
        y_pred, _ = self._forward(map_leaves(lambda each: each[: self._own], x), training=False)
        largest = max(int(np.prod(each.shape)) for each in tree.flatten(y_pred))
        self.values_per_row = max(self.values_per_row, largest // self._own)
        self._by_rows = all(len(each.shape) and each.shape[0] == self._own for each in tree.flatten(y_pred))
        if self._repeats:
            y_pred = (
                tree.map_structure(partial(spread_outputs, rows=self.rows), y_pred)
                if self._by_rows
                else self._forward(x, training=False)[0]
            )
        yield _Part(x, y, sample_weight, y_pred, self.rows)
        # Twice: one part's loss may happen to be the mean of all.
        first = slice(self.rows // 3)
        yield _Part(x, map_leaves(partial(with_zeros, rows=first, step=2), y), sample_weight, y_pred, self.rows)
        others = slice(self.rows // 3, self.rows)
        yield _Part(x, map_leaves(partial(with_zeros, rows=others, step=3), y), sample_weight, y_pred, self.rows)
        both = map_leaves(partial(with_largest, starts=(0, self.rows // 3)), y)
        yield _Part(x, both, sample_weight, y_pred, self.rows)

    def _of_losses(self, whole: _Part) -> Findings:
        model, compiled = self._model, compiled_losses(self._model)
        parts = [self._part_of(whole, 0, self.rows // 3), self._part_of(whole, self.rows // 3, self.rows)]
        compute = self._compute_loss if computes_own_loss(model) else _compute_compiled
        rows = [part.rows for part in parts]
        calls = [
            recorded_calls(model, unknown_losses(model), partial(compute, model, part)) for part in (whole, *parts)
        ]
        sums, means = set[int](), set[int]()
        # Calls are matched by their order. Where a part calls other losses than the batch, nothing can be said.
        if len({len(each) for each in calls}) == 1:
            for of_whole, *of_parts in zip(*calls, strict=True):
                loss = of_whole[0]
                if is_known(loss):
                    continue
                verdict = combination_of(_call, of_whole, of_parts, rows, loss)
                index = next((i for i, each in enumerate(compiled) if each is loss), None)
                if verdict is Combination.SUM and index is not None:
                    sums.add(index)
                elif verdict is Combination.MEAN and index is not None:
                    means.add(index)
                elif verdict in (*SUMS, Combination.OTHER):
                    return Findings([], {}, error=_error(f"The loss {loss.name!r} of {model.name!r}", verdict))
        is_sum = False
        if computes_own_loss(model):
            with noted_as_sums([compiled[index] for index in sums]):
                verdict = combination_of(partial(self._compute_loss, model), whole, parts, rows, model)
            is_sum = verdict is Combination.SUM
            if verdict in (Combination.UNSCALED_SUM, Combination.OTHER) or (is_sum and overrides(model, "train_step")):
                return Findings([], {}, error=_error(f"What compute_loss of {type(model).__name__} returns", verdict))
        return Findings(sorted(sums), {}, is_sum, means=tuple(means - sums))

    def _part_of(self, whole: _Part, start: int, stop: int) -> _Part:
        if self._by_rows:
            return whole.of(start, stop)
        part = whole._replace(y_pred=None).of(start, stop)
        return part._replace(y_pred=self._forward(part.x, training=False)[0])

    def _compute_loss(self, model: Any, part: _Part) -> Any:
        with keras.StatelessScope(), _program():
            return model._compute_loss(
                x=part.x, y=part.y, y_pred=part.y_pred, sample_weight=part.sample_weight, training=True
            )

    def _forward(self, x: Any, *, training: bool, other_seeds: bool = False) -> tuple[Any, list[tuple[Any, Any]]]:
        """The predictions, and the losses that layers add meanwhile, with the layer."""
        model = self._model
        seeds = [v for v in model.non_trainable_variables if "seed_generator_state" in v.path] if other_seeds else []
        mapping = [(seed, ops.cast(seed.value + 1, seed.dtype)) for seed in seeds]
        with (
            recorded_additions() as added,
            keras.StatelessScope(state_mapping=mapping),
            collected_statistics(),  # batch normalization is over all replicas, or local on purpose
            _program(),
        ):
            y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
        return y_pred, added

    def _added(self) -> Findings:
        """What layers add: of the samples, and with some of them changed, as all may take one way through the model."""
        if not adding_layers(self._model):
            return Findings([], {})
        x = self._data[0]
        found = self._added_for(x)
        if found.error:
            return found
        try:
            changed = self._added_for(map_leaves(with_reflected_rows, x))
        except _ProgramError as error:
            logger.info("Layers of %r do not know changed samples: %r", self._model.name, error.__cause__)
            return found
        return changed if changed.error else found.updated(changed)

    def _added_for(self, x: Any) -> Findings:
        """Of what depends on random numbers nothing can be said."""
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
        found: dict[str, list[bool | None]] = {}
        if len({len(each) for each in (whole, again, *of_parts)}) > 1:
            return Findings([], {})
        for (layer, value), (_, other), *of in zip(whole, again, *of_parts, strict=True):
            own, numbers = float(value), [float(each[1]) for each in of]
            index = str(next(i for i, each in enumerate(layers) if each is layer))
            is_random = not is_close(own, float(other), own)
            # Of other seeds another value: it follows from random numbers, which the parts draw differently as well.
            tolerance = tolerance_of(layer.compute_dtype)
            verdict = Combination.UNKNOWN if is_random else combination_of_values(own, numbers, rows, tolerance)
            if verdict is Combination.SUM and is_close(numbers[0], numbers[1], own):
                # No sum over samples, of which the parts have unequally many: a term that is divided by the number of
                # replicas. Those without samples, in the last batch, do not count, and its rest would be missing.
                verdict = Combination.OTHER
            if verdict is Combination.OTHER:
                what = f"What the layer {layer.name!r} of {self._model.name!r} passes to add_loss"
                return Findings([], {}, error=_error(what, verdict))
            found.setdefault(index, []).append(None if verdict is Combination.UNKNOWN else verdict is Combination.SUM)
        return Findings([], found)


def _call(recorded: tuple[Any, ...]) -> Any:
    loss, *arguments = recorded
    with _program():
        return loss(*arguments)


def _compute_compiled(model: Any, part: _Part) -> Any:
    # Without effect on the means of single losses, which the program may read before it takes a step.
    with keras.StatelessScope(), _program():
        return model._compile_loss(part.y, part.y_pred, part.sample_weight)


def _error(what: str, verdict: Combination) -> str:
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
