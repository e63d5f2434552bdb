"""What two tasks must agree on, and what they say when they do not."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.cluster import ClusterSpec, JobFacts
from phalanx.cluster.task_comparison import TaskDescription, cluster_by_task, describe_disagreement

SPEC = ClusterSpec({"worker": ["a:1", "b:1"]})


def description(task: str = "worker/0", **changes: object) -> TaskDescription:
    base = TaskDescription(
        task=task,
        incarnation=task,
        host="host",
        address="a:1",
        pid=1,
        cluster=cluster_by_task(SPEC),
        phalanx="0.1",
        facts=JobFacts(keras="3.15", backend="jax", seed=1),
    )
    facts = {name: changes.pop(name) for name in list(changes) if name in JobFacts.__struct_fields__}
    return msgspec.structs.replace(base, facts=msgspec.structs.replace(base.facts, **facts), **changes)


def test_equal_tasks_agree() -> None:
    assert describe_disagreement(description(), description("worker/1", host="other", pid=2)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 2}, "seed: 1 on worker/0, 2 on worker/1."),
        ({"seed": None}, "seed: 1 on worker/0, None on worker/1."),
        ({"keras": "3.12"}, "version of Keras: '3.15' on worker/0, '3.12' on worker/1."),
        ({"phalanx": "0.2"}, "version of Phalanx: '0.1' on worker/0, '0.2' on worker/1."),
        ({"backend": "torch"}, "Keras backend: 'jax' on worker/0, 'torch' on worker/1."),
        ({"backend_policy": "mixed"}, "backend policy: 'same' on worker/0, 'mixed' on worker/1."),
        ({"extra": {"floatx": "float16"}}, "floatx: None on worker/0, 'float16' on worker/1."),
        (
            {"cluster": {"worker/0": "a:1", "worker/1": "c:1"}},
            "cluster: worker/1 is at b:1 according to worker/0, and at c:1 according to worker/1.",
        ),
        (
            {"cluster": {**cluster_by_task(SPEC), "worker/2": "c:1"}},
            "worker/2 is at no address (it is not in the cluster) according to worker/0, and at c:1 according to",
        ),
    ],
)
def test_each_difference_names_both_sides_and_values(changes: dict[str, object], message: str) -> None:
    one, other = description(), description("worker/1", **changes)
    text = describe_disagreement(one, other)
    assert text is not None
    assert message in text
    assert "worker/0 (pid 1 on host) and worker/1 (pid 1 on host)" in text
    assert describe_disagreement(other, one) == text


def test_all_differences_are_told_at_once() -> None:
    text = describe_disagreement(description(), description("worker/1", seed=2, keras="3.12"))
    assert text is not None
    assert text.count("\n  - ") == 2


def test_backends_may_differ_when_the_policy_says_so() -> None:
    one = description(backend_policy="mixed")
    assert describe_disagreement(one, description("worker/1", backend_policy="mixed", backend="torch")) is None


def test_an_evaluator_in_only_one_of_the_clusters_is_no_difference() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1"], "evaluator": ["e:1"]})
    assert cluster_by_task(spec) == cluster_by_task(SPEC)
