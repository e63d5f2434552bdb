"""Training policy of a strategy: what is compressed, and when the replicas synchronize."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras

from phalanx.compression import Compression
from phalanx.engines.spmd.placement import Placement
from phalanx.training.steps.outer_optimizer import OuterOptimizer


@dataclass(frozen=True)
class SyncPeriod:
    """Local SGD: the replicas train independently and exchange weights periodically.

    Attributes:
        steps: Number of steps between two exchanges.
        outer: Optimizer that applies the replicas' mean progress to the common weights.
        overlap: Whether an exchange proceeds during the steps after it, and takes effect at the next one.
    """

    steps: int
    outer: OuterOptimizer
    overlap: bool = False


@dataclass(frozen=True)
class TrainingPolicy:
    """Policy by which a strategy trains its models; see the strategies' arguments.

    Attributes:
        compression: Compression of gradients, or of exchanged weights if there is a period; None for none.
        period: Period of local SGD; None to merge the gradients of every step.
        synchronized_batch_norm: Whether all batch normalization is over the global batch.
        placement: Division of the model over a mesh of devices by one compiled program; None if each replica has its
            own program.
        device: Device on which the model computes, as for `keras.device`; None for the backend's default.
    """

    compression: Compression | None = None
    period: SyncPeriod | None = None
    synchronized_batch_norm: bool = False
    placement: Placement | None = None
    device: str | None = None


def on_device(name: str | None) -> AbstractContextManager[Any]:
    """Create and compute inside the context on this Keras device; None for the default."""
    return nullcontext() if name is None else keras.device(name)  # type: ignore[no-any-return]


EVERY_STEP = TrainingPolicy()
"""Gradients are merged at every step, without compression."""
