"""Accelerated updates of Keras's optimizers on PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from phalanx.engines.accelerations import registry
from phalanx.engines.accelerations.torch_flush_denormals import flushing_denormals
from phalanx.engines.accelerations.torch_fused_adam import fused_adam


class AcceleratedUpdates:
    """Contexts for the updates of an optimizer, with the enabled accelerations that compute the same."""

    def __init__(self) -> None:
        self._fused = registry.choose("torch_fused_adam", fused_adam, nullcontext)

    @contextmanager
    def __call__(self, optimizer: Any) -> Iterator[None]:
        with self._fused(optimizer), flushing_denormals(optimizer):
            yield
