"""Probe that determines whether, outside of training, the output for a sample depends on the rest of its batch.

A custom layer may compute something from the whole batch: in every call, or only outside of training. So one process
predicts a few samples, and also as two replicas that each have a part of them, as in `step_probe`. If the outputs
differ, replicas predict whole batches; an evaluation, whose metrics cover parts, is refused. If only the first axis is
not the sample axis, losses and metrics handle the outputs, but `predict` cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
from keras import tree

from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines import make_engine
from phalanx.engines.local_ranks import LocalRanks
from phalanx.keras_compat import model_state
from phalanx.training.checks.step_comparison import COARSE_TOLERANCE, advice_on_layers, rounds_coarsely
from phalanx.training.checks.step_probe import can_be_tried
from phalanx.training.checks.trial_samples import (
    TRIAL_RANKS,
    part_of,
    take_trial_samples,
    trial_part_sizes,
    with_short_texts,
)
from phalanx.training.program_effects.program_objects import may_depend_on_size
from phalanx.training.program_effects.program_state import ProgramState

Array = np.ndarray[Any, Any]

TOLERANCE = 2e-4
"""Relative to the largest output: a small difference of large numbers has lost some digits."""

logger = logging.getLogger(__name__)


def is_needed(model: Any, method: str) -> bool:
    """Whether there is anything to determine; the same on all ranks.

    Args:
        method: The method, "predict" or "evaluate".
    """
    if model_state.overrides(model, "predict_step"):
        return method == "predict"  # an evaluation does not call it
    return model_state.has_custom_forward(model)


class OutputDependence(Enum):
    """Dependence of a batch's outputs on its samples."""

    ROWS = "a row for each sample, of this alone"
    OTHER_AXIS = "each sample alone, along another axis than the first"
    BATCH = "the batch as a whole"


def find_output_dependence(model: Any, data: Any, structure: ElementStructure, *, replicas: int) -> OutputDependence:
    """Determine what the outputs for a few samples depend on; ROWS if they cannot be computed.

    Args:
        model: The built model.
        data: Local batch, `(x, y, sample_weight)`.
        structure: Structure of the batch.
        replicas: Number of replicas that share the global batch.
    """
    if not can_be_tried(model, data):
        return OutputDependence.ROWS
    ranks = LocalRanks()
    engine = make_engine(model, ranks)
    engine.set_batch_structure(structure)

    def predict(part: Any, share: float) -> list[Array]:
        engine.begin()
        try:
            outputs = engine.predict(part, structure, share)
        finally:
            engine.end()
        return [np.asarray(output).astype(np.float64) for output in tree.flatten(outputs)]

    for part in trial_part_sizes(data, replicas):
        state = ProgramState(model)
        try:
            with state.restored_on_exit():
                samples = with_short_texts(take_trial_samples(data, 0, part), part)
                found = _compare(model, predict, state, ranks, samples, part)
            if found is not OutputDependence.ROWS or not may_depend_on_size(model):
                return found
        except Exception as error:  # the model may need a batch of its usual size
            logger.info("The outputs of %r cannot be computed of parts of %d samples: %r", model.name, part, error)
    return OutputDependence.ROWS


def refusal_message(model: Any) -> str:
    """Error message for an evaluation."""
    return (
        f"Replicas that each see a part of a batch would not compute what one process does with "
        f"{type(model).__name__}: outside of training its outputs for a few samples depend on what else is in their "
        f"batch. {advice_on_layers(model)}"
    )


def _compare(
    model: Any,
    predict: Callable[[Any, float], list[Array]],
    state: ProgramState,
    ranks: LocalRanks,
    samples: Any,
    part: int,
) -> OutputDependence:
    first = ranks.whole(lambda: predict(samples, 1.0))
    state.change_seeds()
    other = ranks.whole(lambda: predict(samples, 1.0))
    parts = ranks.compute(
        TRIAL_RANKS, lambda rank: predict(part_of(samples, rank, part), 1.0 / TRIAL_RANKS), state.restore
    )
    tolerance = COARSE_TOLERANCE if rounds_coarsely(model) else TOLERANCE
    found = OutputDependence.ROWS
    for number, output in enumerate(first):
        own = [each[number] for each in parts]
        if not output.ndim:
            continue
        axis = _samples_axis(output, own)
        if axis is None:
            return OutputDependence.BATCH
        if axis:
            found = OutputDependence.OTHER_AXIS
        if not np.isfinite(output).all():
            continue
        limit = tolerance * np.abs(output).max(initial=0)
        is_random = np.abs(other[number] - output).max(initial=0) > limit
        if not is_random and np.abs(np.concatenate(own, axis) - output).max(initial=0) > limit:
            return OutputDependence.BATCH
    return found


def _samples_axis(whole: Array, parts: Sequence[Array]) -> int | None:
    """Return the axis along which the parts concatenate to the whole; None if there is none."""
    for axis in range(whole.ndim):
        size = sum(part.shape[axis] for part in parts if part.ndim == whole.ndim)
        joined = [*whole.shape[:axis], *whole.shape[axis + 1 :]]
        if size == whole.shape[axis] and all([*p.shape[:axis], *p.shape[axis + 1 :]] == joined for p in parts):
            return axis
    return None
