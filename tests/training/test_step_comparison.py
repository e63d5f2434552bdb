"""What the trial of a step takes for a difference, and what for rounding."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from phalanx.training.checks.step_comparison import StepComparison, StepResults


def _results(total: float) -> StepResults:
    """Of a step that differs in a metric alone."""
    nothing: dict[str, Any] = {}
    return StepResults(nothing, nothing, nothing, {"entropy/total": np.array([total])}, nothing, nothing)


@pytest.mark.parametrize(("rounded", "part"), [(4.6996, ""), (4.732072, "'entropy/total' differs")])
def test_a_metric_may_differ_by_what_rounding_errors_make_of_it(rounded: float, part: str) -> None:
    """One that divides by the sum of logits, which may be almost zero, does."""
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    whole, ranks = _results(4.732071), [_results(4.745258)] * 2
    comparison = StepComparison(model, "train_step", _results(0.0), whole, whole, _results(rounded), ranks)
    verdict = comparison.verdict()
    assert part in verdict
    assert bool(part) == bool(verdict)
