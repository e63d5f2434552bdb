"""Outer optimizers of local SGD, which apply the mean progress of the replicas in an exchange.

They are pure functions: `step(anchor, progress, velocity)` returns the new anchor and the new velocity. `progress` is
the mean over the replicas of *where they started* minus *where they are*: it plays the role of a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from phalanx.collectives.communicator import Array
from phalanx.errors import ConfigurationError

Arrays = Sequence[Array]


class OuterOptimizer(Protocol):
    """Optimizer of the weights that all replicas share."""

    def step(self, anchor: Arrays, progress: Arrays, velocity: Arrays) -> tuple[list[Array], list[Array]]:
        """Return the next anchor and velocity, float32.

        Args:
            anchor: The common weights, one array for each variable; not modified.
            progress: Progress of the replicas since the anchor, of the same shapes; not modified.
            velocity: Velocity that the last call returned; empty at first; not modified.
        """


@dataclass(frozen=True)
class OuterSGD:
    """SGD with momentum on the replicas' progress (Douillard et al. 2023, DiLoCo), with Keras's formulas:

        v = momentum v - learning_rate p
        w = w + momentum v - learning_rate p     (nesterov)
        w = w + v                                (else)

    Args:
        learning_rate: Factor of the progress; 0.7 in DiLoCo.
        momentum: Decay of the velocity; 0.9 in DiLoCo.
        nesterov: Whether to use Nesterov momentum, as DiLoCo does.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigurationError(f"OuterSGD got learning_rate={self.learning_rate}; it must be greater than 0.")
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"OuterSGD got momentum={self.momentum}; it must be at least 0 and below 1.")

    def step(self, anchor: Arrays, progress: Arrays, velocity: Arrays) -> tuple[list[Array], list[Array]]:
        """See `OuterOptimizer.step`."""
        rate, momentum = np.float32(self.learning_rate), np.float32(self.momentum)
        if not momentum:
            return [a - rate * p for a, p in zip(anchor, progress, strict=True)], []
        velocity = velocity or [np.zeros_like(a) for a in anchor]
        moved = [momentum * v - rate * p for v, p in zip(velocity, progress, strict=True)]
        if self.nesterov:
            ahead = zip(anchor, moved, progress, strict=True)
            return [a + momentum * v - rate * p for a, v, p in ahead], moved
        return [a + v for a, v in zip(anchor, moved, strict=True)], moved


AVERAGE = OuterSGD(1.0, 0.0)
"""The replicas' mean itself (Stich 2019, "Local SGD Converges Fast and Communicates Little")."""
