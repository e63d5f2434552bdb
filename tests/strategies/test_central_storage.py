"""What `CentralStorageStrategy` refuses, and one replica. It trains as in `test_mirrored_strategy`."""

from __future__ import annotations

import json
from typing import Any

import pytest

import phalanx
from phalanx.errors import ConfigurationError
from tests.launcher.conftest import Launcher, launcher
from tests.support import fork_server
from tests.support.backends import FIRST
from tests.support.programs import environment

__all__ = ["launcher"]

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute_devices": 0}, "CentralStorageStrategy needs at least one device"),
        ({"compute_devices": "cpu:0"}, "must be a number of replicas or a list"),
        (
            {"compute_devices": 2, "parameter_device": "gpu:3"},
            "parameter_device is 'gpu:3'; the first replica stores the variables",
        ),
        ({"compute_devices": 2, "parameter_device": "tpu"}, "'tpu' is not a device"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        phalanx.CentralStorageStrategy(**arguments)


def test_a_cluster_with_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"worker": ["localhost:1"], "ps": ["localhost:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": spec, "task": {"type": "worker", "index": 0}}))
    monkeypatch.setenv("PHALANX_JOB_ID", "a job")
    with pytest.raises(ConfigurationError, match="Start it without `--ps`"):
        phalanx.CentralStorageStrategy()


@pytest.mark.slow
def test_a_job_on_several_hosts_is_refused(launcher: Launcher) -> None:
    launcher.environment["KERAS_BACKEND"] = FIRST
    program = launcher.script(
        """
        os.environ["PHALANX_HOST_ID"] = f"host {rank}"
        import phalanx
        phalanx.experimental.CentralStorageStrategy()
        """
    )
    job = launcher.run("-n", "2", program)
    assert job.code == ConfigurationError.exit_code, job.err
    assert "is for one host, and this job runs on host 0, host 1" in job.out + job.err


def test_a_single_replica_is_plain_keras(launcher: Launcher) -> None:
    launcher.environment |= environment(FIRST)
    launcher.popen = fork_server.popen
    program = launcher.script(
        """
        import phalanx
        strategy = phalanx.CentralStorageStrategy(1, parameter_device="/cpu:0")
        print(strategy.num_replicas_in_sync, strategy.local_devices, "TF_CONFIG" in os.environ)
        """
    )
    job = launcher.python(program)
    assert job.lines == ["1 ('cpu:0',) False"], job.err
