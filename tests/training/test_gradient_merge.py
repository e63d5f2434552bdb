from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phalanx.compression import TopK
from phalanx.engines.step_layout import MergeWeight, StepLayout
from phalanx.training.steps.gradient_merge import CustomLoopMerge, StepMerge


class _Alone:
    """A communicator of one rank."""

    rank, world_size = 0, 1

    def all_gather(self, array: Any) -> list[Any]:
        return [array]

    def all_reduce(self, arrays: Sequence[Any], *_: Any, out: Sequence[Any], scale: Any = None) -> None:
        for array, view, factor in zip(arrays, out, scale or [1.0] * len(arrays), strict=True):
            np.multiply(array, array.dtype.type(factor), out=view)


def _replica() -> Any:
    alone = _Alone()
    return SimpleNamespace(
        elastic=None,
        micro_batches=None,
        notice=None,
        is_chief=True,
        generation=1,
        communicator=alone,
        all_reduce=alone.all_reduce,
    )


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
    replica = _replica()
    array = np.full(3, np.nan, "float32")
    layout = StepLayout.of([array], [weight])
    np.testing.assert_array_equal(layout.unpack(StepMerge(replica)(layout, [array], 0.0))[0], merged)
    np.testing.assert_array_equal(layout.unpack(StepMerge(replica)(layout, [array], 1.0))[0], np.nan)


FEW = TopK(0.1, values=None)
"""Leaves most of a gradient to later steps."""
RAMP, ZEROS = np.linspace(1, 2, 2000, dtype="float32"), np.zeros(2000, "float32")


def test_what_a_compression_keeps_of_one_optimizer_does_not_reach_the_weights_of_another() -> None:
    """Two generators of a CycleGAN have weights of the same shapes."""
    merge = CustomLoopMerge(_replica(), FEW)
    one, other = merge.function_for([object()]), merge.function_for([object()])
    for _ in range(3):
        assert np.count_nonzero(one([RAMP])) == 200
        np.testing.assert_array_equal(other([ZEROS]), 0)
    assert np.count_nonzero(one([ZEROS])) == 200  # what is its own does come later


def test_members_forget_what_a_compression_keeps_of_a_custom_loop_when_one_joins() -> None:
    """It has nothing of it, and begins with the last commit."""
    replica = _replica()
    merge = CustomLoopMerge(replica, FEW).function_for([object()])
    merge([RAMP])
    replica.generation = 2
    np.testing.assert_array_equal(merge([ZEROS]), 0)
