"""Means over steps, when each rank sees only a part of each step.

A custom `train_step` often ends in `tracker.update_state(loss)`: a `keras.metrics.Mean` of one number per step. Each
rank has such a number for its part of the step. Weighted by the ranks' shares of the global batch, the parts make one
step:

    total = sum over r of share_r * loss_r    count = sum over r of share_r = 1

Keras's means compute what they add in one function, `reduction_metrics.reduce_to_samplewise_values`, which is patched
while a step runs or is traced. A mean of samples, or one with a sample weight, is not changed: there, the ranks'
samples add up.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from keras import ops
from keras.src.metrics import reduction_metrics

from phalanx.keras_compat.patching import PatchedFunction


class _Steps(threading.local):
    """The steps that this thread is in, innermost last. Keras's functions are patched for all threads."""

    def __init__(self) -> None:
        self.shares: list[Callable[[], Any]] = []


_steps = _Steps()


def is_in_step() -> bool:
    """Whether this thread runs or traces a step."""
    return bool(_steps.shares)


def share_of_step() -> Any | None:
    """Return this rank's share of the global batch in the step that runs or is traced; None outside of a step."""
    return _steps.shares[-1]() if _steps.shares else None


class WeightedStepMeans(PatchedFunction):
    """A context in which a single number without a weight counts by `share()` in a mean.

    Args:
        share: Returns this rank's share of the global batch: a number, or a tensor if the step is traced.
    """

    def __init__(self, share: Callable[[], Any]) -> None:
        super().__init__(reduction_metrics, "reduce_to_samplewise_values", self._weigh)
        self._share = share

    def __enter__(self) -> None:
        super().__enter__()
        _steps.shares.append(self._share)

    def __exit__(self, *error: object) -> None:
        _steps.shares.pop()
        super().__exit__(*error)

    def _weigh(self, values: Any, sample_weight: Any, reduce_fn: Callable[..., Any], dtype: Any) -> tuple[Any, Any]:
        # With a weight or several values, these are samples, which count by themselves.
        is_number = reduce_fn is ops.mean and sample_weight is None and len(getattr(values, "shape", ())) == 0
        if is_number and is_in_step():
            sample_weight = self._share()
        formed: tuple[Any, Any] = self.original(values, sample_weight, reduce_fn=reduce_fn, dtype=dtype)
        return formed
