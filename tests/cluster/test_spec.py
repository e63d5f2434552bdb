"""ClusterSpec answers as tf.train.ClusterSpec does, and knows ranks."""

from __future__ import annotations

import pytest

from phalanx.cluster import ClusterSpec, Task
from phalanx.errors import ConfigurationError

CLUSTERS = [
    {},
    {"worker": ["a:1"]},
    {"worker": ["a:1", "b:1"], "ps": ["c:1"]},
    {"chief": ["a:1"], "worker": ["b:1", "c:1"], "evaluator": ["d:1"]},
    {"worker": {1: "a:1", 3: "b:1"}},
    {"worker": []},
]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_it_answers_as_tensorflow_does(cluster: dict) -> None:
    tf_spec = pytest.importorskip("tensorflow").train.ClusterSpec(cluster)
    spec = ClusterSpec(cluster)
    assert spec.as_dict() == tf_spec.as_dict()
    assert sorted(spec.jobs) == sorted(tf_spec.jobs)
    assert bool(spec) == bool(tf_spec)
    assert spec.as_cluster_def() == tf_spec.as_cluster_def()
    assert ClusterSpec(tf_spec.as_cluster_def()) == spec
    for job in spec.jobs:
        assert spec.num_tasks(job) == tf_spec.num_tasks(job)
        assert spec.task_indices(job) == tf_spec.task_indices(job)
        if tf_spec.num_tasks(job):
            assert spec.job_tasks(job) == tf_spec.job_tasks(job)
        for index in spec.task_indices(job):
            assert spec.task_address(job, index) == tf_spec.task_address(job, index)
    for wrong in (lambda s: s.num_tasks("ps2"), lambda s: s.task_address("worker", 77)):
        for either in (spec, tf_spec):
            with pytest.raises(ValueError):
                wrong(either)


def test_equality_is_that_of_contents() -> None:
    assert ClusterSpec({"worker": ["a:1"]}) == ClusterSpec({"worker": {0: "a:1"}})
    assert ClusterSpec({"worker": ["a:1"]}) == {"worker": ["a:1"]}
    assert ClusterSpec({"worker": ["a:1"]}) != ClusterSpec({"worker": ["b:1"]})
    assert ClusterSpec(ClusterSpec({"worker": ["a:1"]})) == ClusterSpec({"worker": ["a:1"]})


@pytest.mark.parametrize(
    ("cluster", "ranked"),
    [
        ({"worker": ["a:1", "b:1"]}, ["worker/0", "worker/1"]),
        ({"worker": ["a:1", "b:1"], "chief": ["c:1"]}, ["chief/0", "worker/0", "worker/1"]),
        ({"ps": ["a:1"], "evaluator": ["b:1"], "worker": ["c:1"]}, ["worker/0"]),
        ({"chief": ["a:1"]}, ["chief/0"]),
    ],
)
def test_the_chief_has_rank_0_and_servers_and_evaluators_have_none(
    cluster: dict[str, list[str]], ranked: list[str]
) -> None:
    spec = ClusterSpec(cluster)
    assert [str(task) for task in spec.ranked_tasks] == ranked
    assert str(spec.chief) == ranked[0]


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("worker", "Write a mapping from task types"),
        ({"wroker": ["a:1"]}, "'wroker' is not a task type. The types are chief, worker, ps, evaluator"),
        ({"master": ["a:1"]}, "Write 'chief'"),
        ({"Worker": ["a:1"]}, "Write 'worker'"),
        ({"worker": "a:1"}, "cluster.worker is 'a:1'. Write a list"),
        ({"worker": ["a:1", "b"]}, r"cluster.worker\[1\] is 'b', which has no port"),
        ({"worker": ["a:99999"]}, r"cluster.worker\[0\] is 'a:99999'"),
        (
            {"worker": ["a:1", " a:1"]},
            r"cluster.worker\[0\] and cluster.worker\[1\] have the same address 'a:1'",
        ),
        ({"worker": ["a:1"], "ps": ["a:1"]}, r"cluster.worker\[0\] and cluster.ps\[0\] have the same"),
        ({"worker": {"x": "a:1"}}, "has the key 'x'"),
        ({"chief": ["a:1", "b:1"]}, "at most one chief"),
    ],
)
def test_a_wrong_cluster_is_refused_with_what_to_write(cluster: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ClusterSpec(cluster)  # type: ignore[arg-type]


def test_workers_with_gaps_have_no_ranks() -> None:
    with pytest.raises(ConfigurationError, match="one is absent in between"):
        _ = ClusterSpec({"worker": {1: "a:1", 2: "b:1"}}).ranked_tasks


def test_a_task_must_be_one_of_the_cluster_unless_it_is_an_evaluator() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    spec.check_member(Task("worker", 1))
    spec.check_member(Task("evaluator", 0))
    with pytest.raises(ConfigurationError, match=r"worker/2, but the cluster has only worker/0 \(a:1\), worker/1"):
        spec.check_member(Task("worker", 2))
    with pytest.raises(ConfigurationError, match="the cluster has no 'ps' tasks, only 'worker'"):
        spec.check_member(Task("ps", 0))
    with pytest.raises(ConfigurationError, match="evaluator/1, but the cluster has only evaluator/0"):
        ClusterSpec({"worker": ["a:1"], "evaluator": ["b:1"]}).check_member(Task("evaluator", 1))


@pytest.mark.parametrize(("task_type", "index"), [("boss", 0), ("worker", -1), ("worker", True), ("worker", "0")])
def test_a_wrong_task_is_refused(task_type: str, index: int) -> None:
    with pytest.raises(ConfigurationError):
        Task(task_type, index)
