"""How a step of Keras's `fit` on JAX reduces gradients that an optimizer accumulates."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from phalanx.engines.step_layout import MergeWeight, StepLayout
from phalanx.horovod.keras.fit_hook import _GradientMerge


def test_a_reduction_that_overflows_leaves_the_batch_out_as_a_gradient_does() -> None:
    alone = SimpleNamespace(is_included=False, factor=1.0)
    merge = _GradientMerge(alone, (), is_unfused=True, checks_finite=True)
    gradients = [np.full(2, 3e38, np.float32)]
    layout = StepLayout.of(gradients, [MergeWeight.GRADIENT])
    for accumulated, overflows in ((gradients, True), ([np.ones(2, np.float32)], False), (None, False)):
        with merge.with_accumulated(accumulated), np.errstate(over="ignore"):
            (reduced,) = merge(layout, gradients, 1.0)
        assert np.isinf(reduced).all() == overflows
        assert merge.has_overflowed == overflows, "else what was accumulated before would be lost with the update"
