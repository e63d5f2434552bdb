"""Settings of this process's devices, for every backend."""

from __future__ import annotations

from phalanx.backends import set_memory_growth

__all__ = ["set_memory_growth"]
