"""Options of horovodrun, as variables of the workers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.cli.horovodrun_options import ssh_variables, variables
from phalanx.cli.run import run
from phalanx.config.job_config import JobConfig, TimelineConfig
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.horovod.horovod_environment import HorovodEnvironment
from phalanx.horovod.run_function import run as run_function


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
        == (knobs.stall_warning_s, knobs.stall_shutdown_s)
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


ORIGINAL_OPTIONS = [
    "--autotune",
    "--autotune-bayes-opt-max-samples=1",
    "--autotune-gaussian-process-noise=1",
    "--autotune-log-file=x",
    "--autotune-steps-per-sample=1",
    "--autotune-warmup-samples=1",
    "--binding-args=x",
    "--cache-capacity=1",
    "--cycle-time-ms=1",
    "--disable-cache",
    "--elastic-timeout=5",
    "--fusion-threshold-mb=1",
    "--gloo",
    "--gloo-timeout-seconds=1",
    "--hierarchical-allgather",
    "--hierarchical-allreduce",
    "--host-discovery-script=x",
    "--hosts=x",
    "--jsrun",
    "--log-hide-timestamp",
    "--log-level=INFO",
    "--log-with-timestamp",
    "--log-without-timestamp",
    "--max-np=3",
    "--min-np=1",
    "--mpi",
    "--mpi-args=x",
    "--mpi-threads-disable",
    "--network-interfaces=lo",
    "--no-autotune",
    "--no-hierarchical-allgather",
    "--no-hierarchical-allreduce",
    "--no-mpi-threads-disable",
    "--no-stall-check",
    "--num-nccl-streams=1",
    "--num-proc=2",
    "--output-filename=x",
    "--prefix-output-with-timestamp",
    "--reset-limit=1",
    "--slots-per-host=1",
    "--ssh-port=22",
    "--stall-check-shutdown-time-seconds=1",
    "--stall-check-warning-time-seconds=1",
    "--start-timeout=5",
    "--tcp",
    "--thread-affinity=1",
    "--timeline-filename=x",
    "--timeline-mark-cycles",
    "--use-gloo",
    "--use-jsrun",
    "--use-mpi",
    "--verbose",
    "-p=22",
    "-np=2",
]
"""Those of horovodrun 0.28.1, with values where they take one."""


@pytest.mark.parametrize("option", ORIGINAL_OPTIONS)
def test_every_option_of_horovodrun_is_taken(option: str) -> None:
    flag, _, value = option.partition("=")
    with run.make_context("run", [flag, *([value] if value else []), "train.py"]) as context:
        assert context.params["program"] == ("train.py",)


@pytest.mark.parametrize(
    ("option", "reason"), [("--mpi", "collectives are Phalanx's own"), ("--log-level=INFO", "-v shows more")]
)
def test_an_option_that_is_not_needed_says_why(option: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag, _, value = option.partition("=")
    run.make_context("run", [flag, *([value] if value else []), "train.py"])
    assert f"phalanx run: {flag} is not needed: {reason}" in capsys.readouterr().err
    run.make_context("run", ["train.py", flag])
    assert not capsys.readouterr().err, "an option of the program"


def test_a_file_of_options_is_refused_and_check_build_prints_what_there_is() -> None:
    found = CliRunner().invoke(run, ["--config-file", "x.yaml", "train.py"])
    assert found.exit_code == 2
    assert "on the command line" in found.output
    found = CliRunner().invoke(run, ["-cb"])
    assert found.exit_code == 0
    assert "[X] Keras" in found.output


def test_ssh_gets_the_port_and_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ssh_variables(None, None) == {}
    monkeypatch.setenv("PHALANX_SSH", "ssh -4")
    key = tmp_path / "a key"
    assert ssh_variables(2222, key) == {"PHALANX_SSH": f"ssh -4 -p 2222 -i '{key}'"}


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ({"host_discovery_script": "./find"}, r"phalanx run --workers 1:2 --host-discovery-script ./find script\.py"),
        ({"hosts": "far:2"}, r"phalanx run -np 2 -H far:2 script\.py"),
        ({"min_num_proc": 1, "max_np": 3}, r"phalanx run -np 2 --min-np 1 --max-np 3 script\.py"),
    ],
)
def test_what_a_function_cannot_have_names_the_command(arguments: dict[str, Any], command: str) -> None:
    with pytest.raises(UnsupportedError, match=command):
        run_function(print, num_proc=2, **arguments)
    with pytest.raises(ConfigurationError, match="this host has no 'nonesuch'"):
        run_function(print, num_proc=2, network_interfaces="nonesuch")
