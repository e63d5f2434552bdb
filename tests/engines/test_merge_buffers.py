"""What merges keep from step to step."""

from __future__ import annotations

import numpy as np

from phalanx.engines.step_layout import MergeWeight, StepLayout
from phalanx.training.replica import single_replica
from phalanx.training.steps.gradient_merge import MAX_CACHED_SCALES, MAX_LAYOUTS, MergeBuffers, MergeMode, StepMerge


def layout_of(size: int) -> StepLayout:
    return StepLayout.of([np.zeros(size, np.float32)], [MergeWeight.GRADIENT])


def test_buffers_are_used_in_turn_and_only_the_last_ones_are_kept() -> None:
    buffers = MergeBuffers()
    (first,), _ = buffers.next(layout_of(1))
    (second,), _ = buffers.next(layout_of(1))
    assert first is not second
    for size in range(2, 3 * MAX_LAYOUTS):
        buffers.next(layout_of(size))
        (again,), _ = buffers.next(layout_of(1))
        assert again is first or again is second
    assert len(buffers._rings) == MAX_LAYOUTS


def test_shares_that_change_do_not_fill_the_memory() -> None:
    merge, layout = StepMerge(single_replica()), layout_of(1)
    with merge.in_mode(MergeMode.LOCAL):
        for step in range(MAX_CACHED_SCALES + 10):
            merge(layout, [np.zeros(1, np.float32)], 1 / (step + 1))
    assert len(merge._scales) <= MAX_CACHED_SCALES
