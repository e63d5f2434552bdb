"""The settings in Horovod's environment variables, read once, when the process joins the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import (
    CACHE_CAPACITY,
    CYCLE_TIME,
    DEFAULT_CACHE_CAPACITY,
    DEFAULT_CYCLE_MS,
    DEFAULT_FUSION_BYTES,
    DEFAULT_STALL_WARNING_S,
    FUSION_THRESHOLD,
)
from phalanx.config.job_config import CollectiveConfig
from phalanx.config.parsing import parse_number


@dataclass(frozen=True, slots=True)
class HorovodEnvironment:
    """Settings with units in their names; `phalanx.config.environment_variables` describes each variable."""

    fusion_bytes: int = DEFAULT_FUSION_BYTES
    cycle_s: float = DEFAULT_CYCLE_MS / 1e3
    cache_capacity: int = DEFAULT_CACHE_CAPACITY
    stall_warning_s: float = DEFAULT_STALL_WARNING_S
    stall_shutdown_s: float | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> HorovodEnvironment:
        """Read the values in the environment.

        Args:
            environ: Values by name; the process's environment if not given.

        Raises: ConfigurationError naming the variable and its value.
        """
        values = process_environment() if environ is None else environ
        collectives = CollectiveConfig.from_environment(values)
        return cls(
            fusion_bytes=int(parse_number(values, FUSION_THRESHOLD, DEFAULT_FUSION_BYTES, unit="bytes")),
            cycle_s=parse_number(values, CYCLE_TIME, DEFAULT_CYCLE_MS, unit="milliseconds") / 1e3,
            cache_capacity=int(parse_number(values, CACHE_CAPACITY, DEFAULT_CACHE_CAPACITY)),
            stall_warning_s=collectives.stall_warning_s,
            stall_shutdown_s=collectives.stall_shutdown_s,
        )
