"""The settings of a job and of this process's devices.

`phalanx.config.set_memory_growth` is public; `job_config` reads the environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.engines import set_memory_growth

__all__ = ["set_memory_growth"]


def __getattr__(name: str) -> Any:
    # Imported when first used: `job_config` is read by processes that never import Keras.
    if name == "set_memory_growth":
        from phalanx.engines import set_memory_growth

        return set_memory_growth
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
