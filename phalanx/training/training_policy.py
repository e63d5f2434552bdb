"""How a strategy trains its models: what is compressed, and when the replicas synchronize."""

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
    """Local SGD: the replicas take steps of their own and exchange weights periodically.

    Attributes:
        steps: number of steps between two exchanges.
        outer: optimizer that applies the replicas' mean progress to the common weights.
        overlap: whether an exchange proceeds during the steps after it, and takes effect at the next one.
    """

    steps: int
    outer: OuterOptimizer
    overlap: bool = False


@dataclass(frozen=True)
class TrainingPolicy:
    """See the strategies' arguments.

    Attributes:
        compression: of gradients, or of exchanged weights where there is a period; None: they are sent as they are.
        period: of local SGD; None: the gradients of every step are merged.
        synchronized_batch_norm: whether all batch normalization is over the global batch.
        placement: how one compiled program divides the model over a mesh of devices; None: each replica computes a
            program of its own.
        device: where the model computes, as `keras.device` takes it; None: where the backend does by default.
    """

    compression: Compression | None = None
    period: SyncPeriod | None = None
    synchronized_batch_norm: bool = False
    placement: Placement | None = None
    device: str | None = None


def on_device(name: str | None) -> AbstractContextManager[Any]:
    """A context in which Keras makes and computes things on a device; None: where it would."""
    return nullcontext() if name is None else keras.device(name)  # type: ignore[no-any-return]


EVERY_STEP = TrainingPolicy()
"""Gradients are merged at every step, without compression."""
