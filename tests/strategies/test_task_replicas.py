"""`MultiWorkerMirroredStrategy` on tasks that have several devices."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from phalanx.cluster.resolvers.simple import SimpleClusterResolver
from phalanx.cluster.spec import ClusterSpec
from phalanx.config.environment_variables import JOB_ID, REPLICA_CLUSTER, TASK_REPLICAS, VISIBLE_GPUS
from phalanx.errors import ConfigurationError
from phalanx.strategies import task_replicas
from phalanx.strategies.task_replicas import cluster_of_replicas, task_devices
from tests.parameter_server.tasks import Tasks
from tests.support.backends import slow_after_the_first
from tests.training.compare import assert_close

TWO_HOSTS = {"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["a:3"]}
ONE_HOST = {"worker": ["a:1", "a:2"]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", slow_after_the_first())
def test_two_tasks_of_two_replicas_train_as_one_process_does(tmp_path: Path, backend: str) -> None:
    program = ["-m", "tests.strategies.task_program", str(tmp_path)]
    settings = {TASK_REPLICAS: "2"}
    with Tasks(
        tmp_path, program, servers=0, workers=2, backend=backend, settings=settings, starts_others=True
    ) as tasks:
        assert set(tasks.ends().values()) == {0}, tasks.everything()
        started = [tasks.processes[name].pid for name in ("worker/0", "worker/1")]
        said = tasks.everything()
    ranks = [pickle.loads((tmp_path / f"rank-{rank}").read_bytes()) for rank in range(4)]
    assert [found["replicas"] for found in ranks] == [4] * 4
    assert [found["workers"] for found in ranks] == [2] * 4, "the user's cluster has two tasks"
    for identity in ("task", "own task"):
        assert [found[identity] for found in ranks] == [("worker", 0)] * 2 + [("worker", 1)] * 2
    assert [ranks[0]["pid"], ranks[2]["pid"]] == started
    assert [ranks[1]["parent"], ranks[3]["parent"]] == started
    for found in ranks:
        assert_close(found["weights"], ranks[0]["plain"]["weights"], 1e-5, "weights")
        for name, values in ranks[0]["plain"]["history"].items():
            assert_close(found["history"][name], values, 1e-5, name)
    assert "Traceback" not in said


def devices(cluster: dict[str, list[str]], kind: str = "worker", index: int = 0) -> list[str] | None:
    return task_devices(SimpleClusterResolver(cluster, task_type=kind, task_id=index))


def test_a_task_has_a_replica_for_each_gpu_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (JOB_ID, REPLICA_CLUSTER, TASK_REPLICAS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(task_replicas, "is_program", lambda: True)
    monkeypatch.setenv(VISIBLE_GPUS, "4,5,6")
    gpus = ["gpu:0", "gpu:1", "gpu:2"]
    assert devices(TWO_HOSTS) == devices(TWO_HOSTS, "chief") == devices({}) == gpus
    assert devices(ONE_HOST) == ["gpu:0"], "the tasks of a host share its GPUs in a way that they know"
    assert devices(TWO_HOSTS, "evaluator") is None
    monkeypatch.setenv(VISIBLE_GPUS, "")
    assert devices(TWO_HOSTS) == ["cpu:0"]
    monkeypatch.setenv(TASK_REPLICAS, "2")
    assert devices(ONE_HOST) == ["cpu:0", "cpu:1"]
    monkeypatch.setattr(task_replicas, "is_program", lambda: False)
    assert devices(ONE_HOST) == ["cpu:0"]
    monkeypatch.setenv(JOB_ID, "launched")
    assert devices(TWO_HOSTS) is None
    monkeypatch.delenv(JOB_ID)
    monkeypatch.setenv(TASK_REPLICAS, "all")
    with pytest.raises(ConfigurationError, match="PHALANX_TASK_REPLICAS is 'all'"):
        devices(TWO_HOSTS)


def test_the_replicas_of_a_task_have_ranks_in_a_row_and_the_chief_stays_first() -> None:
    spec = ClusterSpec({"chief": ["a:1"], "worker": ["b:1", "c:1"]})
    addresses = ["a:2", "a:3", "b:2", "c:2", "c:3"]
    assert cluster_of_replicas(spec, addresses) == {"chief": ["a:2"], "worker": ["a:3", "b:2", "c:2", "c:3"]}
    assert cluster_of_replicas(ClusterSpec(ONE_HOST), addresses[:3]) == {"worker": ["a:2", "a:3", "b:2"]}
    assert cluster_of_replicas(ClusterSpec({"chief": ["a:1"]}), ["a:2"]) == {"chief": ["a:2"]}
