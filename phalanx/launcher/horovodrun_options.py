"""The options of `horovodrun` that the workers read from their environment, as values of variables. Plain functions."""

from __future__ import annotations

from pathlib import Path

from phalanx.config.variables import (
    AUTOTUNE,
    AUTOTUNE_LOG,
    CACHE_CAPACITY,
    CYCLE_TIME,
    DEFAULT_STALL_WARNING_S,
    FUSION_THRESHOLD,
    MARK_CYCLES,
    STALL_CHECK_DISABLE,
    STALL_CHECK_TIME,
    STALL_SHUTDOWN_TIME,
    TIMELINE,
)
from phalanx.errors import ConfigurationError


def variables(
    *,
    timeline_filename: Path | None = None,
    timeline_mark_cycles: bool = False,
    fusion_threshold_mb: int | None = None,
    cycle_time_ms: float | None = None,
    cache_capacity: int | None = None,
    autotune: bool | None = None,
    autotune_log_file: Path | None = None,
    no_stall_check: bool = False,
    stall_check_warning_time_seconds: float | None = None,
    stall_check_shutdown_time_seconds: float | None = None,
) -> dict[str, str]:
    """What the options set; those that are not given stay as the environment has them.

    Raises: ConfigurationError where the second limit comes before the first.
    """
    warn_s, end_s = stall_check_warning_time_seconds, stall_check_shutdown_time_seconds
    warns_s = DEFAULT_STALL_WARNING_S if warn_s is None and not no_stall_check else warn_s
    if warns_s and end_s and end_s < warns_s:
        raise ConfigurationError(
            f"--stall-check-shutdown-time-seconds {end_s:g} is less than --stall-check-warning-time-seconds "
            f"{warns_s:g}: the job would end before it warns."
        )
    found: dict[str, str | None] = {
        # Absolute, since a program may change its folder before it joins the job.
        TIMELINE: None if timeline_filename is None else str(timeline_filename.absolute()),
        MARK_CYCLES: "1" if timeline_mark_cycles else None,
        FUSION_THRESHOLD: None if fusion_threshold_mb is None else str(fusion_threshold_mb * 2**20),
        CYCLE_TIME: None if cycle_time_ms is None else f"{cycle_time_ms:g}",
        CACHE_CAPACITY: None if cache_capacity is None else str(cache_capacity),
        AUTOTUNE: None if autotune is None else str(int(autotune)),
        AUTOTUNE_LOG: None if autotune_log_file is None else str(autotune_log_file.absolute()),
        STALL_CHECK_DISABLE: "1" if no_stall_check else None,
        STALL_CHECK_TIME: None if warn_s is None else f"{warn_s:g}",
        STALL_SHUTDOWN_TIME: None if end_s is None else f"{end_s:g}",
    }
    return {name: value for name, value in found.items() if value is not None}
