"""How a strategy wants its models trained by the replicas."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.compression import Compression
from phalanx.training.steps.outer_optimizer import OuterOptimizer


@dataclass(frozen=True)
class SyncPeriod:
    """The replicas take steps of their own and come together now and then.

    Attributes:
        steps: so many between two exchanges.
        outer: what is done with the mean of what the replicas have done.
        overlap: whether an exchange goes on during the steps after it, and takes effect at the next one.
    """

    steps: int
    outer: OuterOptimizer
    overlap: bool = False


@dataclass(frozen=True)
class TrainingPolicy:
    """See the strategies' arguments.

    Attributes:
        compression: of gradients, or, where there is a period, of what is exchanged; None: all their bits travel.
        period: None: the gradients of every step are merged.
    """

    compression: Compression | None = None
    period: SyncPeriod | None = None


EVERY_STEP = TrainingPolicy()
"""Gradients are merged at every step, as they are."""
