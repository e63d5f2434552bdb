"""What Horovod's environment variables set, read once, when the job is joined."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.config.job_config import DEFAULT_STALL_S, STALL_SHUTDOWN_TIME, number_of, stall_time_s

FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
"""Bytes up to which tensors that are ready together travel as one. 0: each on its own."""
CYCLE_TIME = "HOROVOD_CYCLE_TIME"
"""Milliseconds between two rounds of negotiation while ranks wait for each other."""
CACHE_CAPACITY = "HOROVOD_CACHE_CAPACITY"
"""How many named operations are remembered, so that repeating one costs a bit."""

DEFAULT_FUSION_BYTES = 64 * 2**20
"""Half of Horovod 0.28's: large enough that the start of a collective does not count."""
DEFAULT_CYCLE_MS = 1.0
DEFAULT_CACHE_CAPACITY = 1024


@dataclass(frozen=True, slots=True)
class HorovodEnvironment:
    """See the constants above; units are in the names."""

    fusion_bytes: int = DEFAULT_FUSION_BYTES
    cycle_s: float = DEFAULT_CYCLE_MS / 1e3
    cache_capacity: int = DEFAULT_CACHE_CAPACITY
    stall_s: float = DEFAULT_STALL_S
    end_s: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> HorovodEnvironment:
        """What the environment says (`os.environ` if not given).

        Raises: ConfigurationError naming the variable and its value.
        """
        values = os.environ if environment is None else environment
        return cls(
            fusion_bytes=int(number_of(values, FUSION_THRESHOLD, DEFAULT_FUSION_BYTES)),
            cycle_s=number_of(values, CYCLE_TIME, DEFAULT_CYCLE_MS) / 1e3,
            cache_capacity=int(number_of(values, CACHE_CAPACITY, DEFAULT_CACHE_CAPACITY)),
            stall_s=stall_time_s(values),
            end_s=number_of(values, STALL_SHUTDOWN_TIME, 0.0) or None,
        )
