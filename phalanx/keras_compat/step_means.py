"""Means over steps, of which each rank sees only a part.

A `train_step` of one's own often ends in `tracker.update_state(loss)`: a `keras.metrics.Mean` of one number for each
step. Each rank has such a number for its part of the step. Counted by the ranks' shares of the global batch, the
parts are one step together:

    total = sum over r of share_r * loss_r    count = sum over r of share_r = 1

Keras's means form what they add in one function, `reduction_metrics.reduce_to_samplewise_values`; while a step runs
(or is traced), ours stands in its place. A mean of samples, or one that is told a sample weight, stays as it is: there
the ranks' samples simply add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops
from keras.src.metrics import reduction_metrics

from phalanx.keras_compat.patching import PatchedFunction

_shares: list[Callable[[], Any]] = []


def share_of_step() -> Any | None:
    """Of the global batch, this rank's in the step that runs or is traced; None outside of `fit` and its kin."""
    return _shares[-1]() if _shares else None


class WeightedStepMeans(PatchedFunction):
    """A context in which one number without a weight counts by `share()` in a mean.

    `share` is this rank's of the global batch; a number, or a tensor where the step is traced.
    """

    def __init__(self, share: Callable[[], Any]) -> None:
        super().__init__(reduction_metrics, "reduce_to_samplewise_values", self._weigh)
        self._share = share

    def __enter__(self) -> None:
        super().__enter__()
        _shares.append(self._share)

    def __exit__(self, *error: object) -> None:
        _shares.pop()
        super().__exit__(*error)

    def _weigh(self, values: Any, sample_weight: Any, reduce_fn: Callable[..., Any], dtype: Any) -> tuple[Any, Any]:
        if reduce_fn is ops.mean and sample_weight is None and len(getattr(values, "shape", ())) == 0:
            sample_weight = self._share()
        formed: tuple[Any, Any] = self.original(values, sample_weight, reduce_fn=reduce_fn, dtype=dtype)
        return formed
