from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.config.launch_config import LaunchConfig
from phalanx.errors import ConfigurationError
from phalanx.launcher import worker_environment
from phalanx.launcher.worker_placement import task_names


def settings(rank: int = 1, **more: object) -> dict[str, str]:
    config = LaunchConfig(**more)  # type: ignore[arg-type]
    return worker_environment.job_settings(["worker/0", "worker/1"], ["a:1", "b:2"], rank, ("s" * 32, "j"), config)


def test_tf_config_is_what_tensorflow_reads() -> None:
    assert json.loads(settings()["TF_CONFIG"]) == {
        "cluster": {"worker": ["a:1", "b:2"]},
        "task": {"type": "worker", "index": 1},
    }


def test_tf_config_names_servers_beside_workers() -> None:
    tasks = task_names(1, chief=True, servers=2, evaluator=True)
    assert tasks == ["chief/0", "worker/0", "ps/0", "ps/1", "evaluator/0"]
    assert json.loads(worker_environment.tf_config(tasks, ["a:1", "b:2", "c:3", "d:4", "e:5"], 3)) == {
        "cluster": {"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3", "d:4"], "evaluator": ["e:5"]},
        "task": {"type": "ps", "index": 1},
    }


def test_settings_of_the_user_win_over_defaults_and_those_of_the_job_over_both() -> None:
    base = {"OMP_NUM_THREADS": "7", "TF_CONFIG": "old", "PHALANX_SECRET": "old", "HOME": "/home"}
    result = worker_environment.worker_environment(base, settings(backend="torch"), threads=3)
    assert result["OMP_NUM_THREADS"] == "7"
    assert result["MKL_NUM_THREADS"] == "3"
    assert result["TF_NUM_INTRAOP_THREADS"] == "3"
    assert result["TF_CONFIG"] != "old"
    assert result["PHALANX_SECRET"] == "s" * 32
    assert result["KERAS_BACKEND"] == "torch"
    assert result["HOME"] == "/home"
    assert result["PYTHONHASHSEED"] == "0"
    assert worker_environment.worker_environment({"PYTHONHASHSEED": "7"}, {}, 1)["PYTHONHASHSEED"] == "7"


def test_horovods_variables_tell_the_place_of_a_process() -> None:
    addresses = ["a:1", "a:2", "b:1", "c:1", "c:2"]
    found = [worker_environment.horovod_settings(addresses, rank) for rank in range(5)]
    assert [each["HOROVOD_RANK"] for each in found] == [*"01234"]
    assert {each["HOROVOD_SIZE"] for each in found} == {"5"}
    assert [each["HOROVOD_LOCAL_RANK"] for each in found] == [*"01001"]
    assert [each["HOROVOD_LOCAL_SIZE"] for each in found] == [*"22122"]
    assert [each["HOROVOD_CROSS_RANK"] for each in found] == [*"00121"]
    assert [each["HOROVOD_CROSS_SIZE"] for each in found] == [*"32332"]


def test_elastic_jobs_and_servers_have_no_ranks_of_horovod() -> None:
    assert settings()["HOROVOD_RANK"] == "1"
    job = ["a:1", "b:2"], 0, ("s" * 32, "j"), LaunchConfig()
    assert "HOROVOD_RANK" not in worker_environment.job_settings(["worker/0", "ps/0"], *job)
    assert "HOROVOD_RANK" not in worker_environment.job_settings(["worker/0", "worker/1"], *job, coordinator="a:9")


def test_only_what_was_asked_for_is_set() -> None:
    assert {"KERAS_BACKEND", "PHALANX_RENDEZVOUS_TIMEOUT"}.isdisjoint(settings())
    assert settings(start_timeout_s=2.5)["PHALANX_RENDEZVOUS_TIMEOUT"] == "2.5"


def test_other_hosts_get_the_settings_but_not_what_describes_this_host() -> None:
    base = {
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": "x",
        "PHALANX_TIMEOUT": "5",
        "PHALANX_HOST_ID": "me",
        "PHALANX_SECRET": "user's",
        "PHALANX_DASHBOARD_TOKEN": "of a page of this host",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/home/me",
        "PATH": "/bin",
    }
    assert worker_environment.forwarded(base) == {"KERAS_BACKEND": "jax", "XLA_FLAGS": "x", "PHALANX_TIMEOUT": "5"}


def test_the_grace_time_is_the_users_to_choose() -> None:
    assert LaunchConfig.from_environment({}) == LaunchConfig()
    assert LaunchConfig.from_environment({"PHALANX_GRACE": "0.5"}).grace_s == 0.5
    for bad in ("soon", "-1", "inf"):
        with pytest.raises(ConfigurationError, match=f"PHALANX_GRACE='{bad}' is not a number of seconds"):
            LaunchConfig.from_environment({"PHALANX_GRACE": bad})


def test_what_an_outer_job_has_told_its_own_task_is_not_told_to_those_that_this_one_starts() -> None:
    told = {
        "PHALANX_ELASTIC_COORDINATOR": "a:1",
        "PHALANX_SNAPSHOTS": "/dev/fd/7",
        "PHALANX_DEVICES_PER_WORKER": "2",
        "PHALANX_LOCAL_REPLICAS": "2",
    }
    base = {**told, "JAX_NUM_CPU_DEVICES": "2", "PHALANX_TIMEOUT": "5"}
    for found in (
        worker_environment.worker_environment(base, settings(), 1),
        worker_environment.worker_environment({}, worker_environment.forwarded(base), 1),
    ):
        assert not told.keys() & found.keys()
        assert found["PHALANX_TIMEOUT"] == "5"
    assert "JAX_NUM_CPU_DEVICES" not in worker_environment.worker_environment(base, settings(), 1)
    own = {"JAX_NUM_CPU_DEVICES": "2"}
    assert worker_environment.worker_environment(own, settings(), 1)["JAX_NUM_CPU_DEVICES"] == "2"


def test_files_of_tls_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = {"PHALANX_TLS_CERT": "own.pem", "PHALANX_TLS_KEY": "/etc/key.pem", "PHALANX_TLS_CA": ""}
    found = worker_environment.worker_environment(base, settings() | {"PHALANX_TLS_CA": "ca.pem"}, 1)
    assert found["PHALANX_TLS_CERT"] == str(tmp_path / "own.pem")
    assert found["PHALANX_TLS_KEY"] == "/etc/key.pem"
    assert found["PHALANX_TLS_CA"] == str(tmp_path / "ca.pem")
    found = worker_environment.worker_environment(base, settings(), 1, "/elsewhere")
    assert found["PHALANX_TLS_CERT"] == "/elsewhere/own.pem"
