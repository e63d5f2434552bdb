from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phalanx.engines.step_layout import MergeWeight, StepLayout
from phalanx.training.steps.gradient_merge import StepMerge


class _Alone:
    """A communicator of one rank."""

    def all_reduce(self, arrays: Sequence[Any], *_: Any, out: Sequence[Any], scale: Any = None) -> None:
        for array, view, factor in zip(arrays, out, scale or [1.0] * len(arrays), strict=True):
            np.multiply(array, array.dtype.type(factor), out=view)


@pytest.mark.parametrize(
    ("weight", "merged"),
    [
        (MergeWeight.GRADIENT, 0.0),
        (MergeWeight.SHARE, 0.0),
        (MergeWeight.ONE, 0.0),
        (MergeWeight.MAX, -np.inf),
        (MergeWeight.MIN, np.inf),
        (MergeWeight.FIRST, np.nan),  # of the chief, whatever its batch
    ],
)
def test_what_a_placeholder_batch_computes_does_not_count_even_if_it_is_not_a_number(
    weight: MergeWeight, merged: float
) -> None:
    alone = _Alone()
    replica: Any = SimpleNamespace(
        elastic=None, micro_batches=None, notice=None, is_chief=True, communicator=alone, all_reduce=alone.all_reduce
    )
    array = np.full(3, np.nan, "float32")
    layout = StepLayout.of([array], [weight])
    np.testing.assert_array_equal(layout.cut(StepMerge(replica)(layout, [array], 0.0))[0], merged)
    np.testing.assert_array_equal(layout.cut(StepMerge(replica)(layout, [array], 1.0))[0], np.nan)
