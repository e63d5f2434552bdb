"""Configuration: environment variables, and the frozen values that the rest of the package reads.

    variables       the table of all variables, with defaults and meanings
    environment     the only access to this process's environment
    parsing         checks of single variables
    job_config      what a task reads: JobConfig, CollectiveConfig
    launch_config   what the launcher reads: LaunchConfig

`phalanx.config.set_memory_growth` is public.
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
