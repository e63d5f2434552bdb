"""Options of horovodrun, as variables of the workers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.cli.horovodrun_options import variables
from phalanx.config.job_config import JobConfig, TimelineConfig
from phalanx.errors import ConfigurationError
from phalanx.horovod.horovod_environment import HorovodEnvironment


def test_without_options_nothing_is_set() -> None:
    assert variables() == {}
    assert JobConfig.from_environment({}) == JobConfig()


def test_the_workers_read_what_the_options_say(tmp_path: Path) -> None:
    found = variables(
        timeline_filename=tmp_path / "t.json",
        timeline_mark_cycles=True,
        fusion_threshold_mb=32,
        cycle_time_ms=2.5,
        cache_capacity=7,
        autotune=True,
        autotune_log_file=Path("log"),
        stall_check_warning_time_seconds=5.0,
        stall_check_shutdown_time_seconds=20.0,
    )
    config, knobs = JobConfig.from_environment(found), HorovodEnvironment.from_environment(found)
    assert config.timeline == TimelineConfig(tmp_path / "t.json", marks_cycles=True)
    assert config.collectives.autotune
    assert config.collectives.autotune_log == Path("log").absolute()
    assert (
        (config.collectives.stall_warning_s, config.collectives.stall_shutdown_s)
        == (knobs.stall_s, knobs.end_s)
        == (5.0, 20.0)
    )
    assert (knobs.fusion_bytes, knobs.cycle_s, knobs.cache_capacity) == (32 * 2**20, 2.5e-3, 7)


def test_stall_checks_and_tuning_can_be_switched_off() -> None:
    found = variables(no_stall_check=True, autotune=False)
    config = JobConfig.from_environment(found)
    assert config.collectives.stall_warning_s == math.inf
    assert not config.collectives.autotune


def test_an_end_before_the_warning_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="before it warns"):
        variables(stall_check_warning_time_seconds=60, stall_check_shutdown_time_seconds=10)
    with pytest.raises(ConfigurationError, match="before it warns"):
        variables(stall_check_shutdown_time_seconds=30)  # the warning's default is later
    assert variables(stall_check_shutdown_time_seconds=30, no_stall_check=True)


@pytest.mark.parametrize(("text", "on"), [("", False), ("0", False), ("False", False), ("no", False), ("1", True)])
def test_switches_of_horovod(text: str, on: bool) -> None:
    assert JobConfig.from_environment({"HOROVOD_AUTOTUNE": text}).collectives.autotune is on


def test_the_variables_of_horovod_mean_the_same() -> None:
    config = JobConfig.from_environment({"HOROVOD_TIMELINE": "a.json"})
    assert config.timeline == TimelineConfig(Path("a.json").absolute())
    assert JobConfig.from_environment({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline is None
    both = {"HOROVOD_TIMELINE": "a.json", "PHALANX_TIMELINE": "b.json"}
    assert JobConfig.from_environment(both).timeline == TimelineConfig(Path("b.json").absolute())
