"""The scale of each loss whose denominator only all ranks together know; see `phalanx.keras_compat.global_losses`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.engines.engine import Array, MergeProtocol


def loss_scales(denominators: Sequence[Array | None], merge: MergeProtocol, share: float) -> Array:
    """The factor of each loss on this rank, shape (losses,), float32. All ranks must call.

    Args:
        denominators: this rank's denominators, scalars; None for a loss that is a sum.
        merge: sums them over the ranks.
        share: this rank's share of the global batch; if 0, its denominators do not count.
    """
    own = np.array([1.0 if d is None else d for d in denominators], np.float32)
    everyone = own
    if any(d is not None for d in denominators):
        everyone = merge.total(own, share)
    if not share:
        return np.zeros_like(own)
    is_sum = np.array([d is None for d in denominators])
    part = np.divide(own, everyone, out=np.zeros_like(own), where=everyone != 0)
    return np.where(is_sum, 1.0, part).astype(np.float32) / np.float32(share)
