"""Configuration: environment variables, and the frozen values that the rest of the package reads.

    environment_variables   the table of all variables, with defaults and meanings
    environment             the only access to this process's environment
    parsing                 parses and checks single variables
    job_config              settings of a task: JobConfig, CollectiveConfig
    launch_config           settings of the launcher: LaunchConfig

`phalanx.config.set_memory_growth` is public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.engines import set_memory_growth

__all__ = ["set_memory_growth"]


def __getattr__(name: str) -> Any:
    # Imported on first use: processes that never import Keras read `job_config`.
    if name == "set_memory_growth":
        from phalanx.engines import set_memory_growth

        return set_memory_growth
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
