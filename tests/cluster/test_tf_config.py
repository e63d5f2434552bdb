"""TF_CONFIG is read as TensorFlow reads it; what is wrong in it is named."""

from __future__ import annotations

import json

import pytest

from phalanx.cluster import Task, TFConfigClusterResolver, join
from phalanx.errors import ConfigurationError

TWO = {"worker": ["host0:2222", "host1:2222"]}


def resolver(config: object, **arguments: object) -> TFConfigClusterResolver:
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigClusterResolver(environ={"TF_CONFIG": text}, **arguments)  # type: ignore[arg-type]


CONFIGS = [
    {"cluster": TWO, "task": {"type": "worker", "index": 1}},
    {"cluster": {**TWO, "ps": ["p:1"], "chief": ["c:1"]}, "task": {"type": "ps", "index": 0}},
    {"cluster": TWO, "task": {"type": "worker", "index": "1"}, "rpc_layer": "grpc"},
    {"cluster": TWO, "task": {"type": "evaluator", "index": 0}, "environment": "cloud"},
    {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}},
    {"cluster": {"worker": {"0": "a:1", "1": "b:1"}}, "task": {"type": "worker", "index": 0}},
    {"cluster": TWO, "task": {"type": "worker", "index": 0}, "session_master": "x:1"},
    {},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_answers_as_tensorflow_does(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    theirs = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    ours = resolver(config)
    assert ours.cluster_spec().as_dict() == theirs.cluster_spec().as_dict()
    assert (ours.task_type, ours.task_id, ours.rpc_layer) == (
        theirs.task_type,
        theirs.task_id,
        theirs.rpc_layer,
    )
    for arguments in ((), ("worker", 0)):
        if (arguments and not config) or config.get("task", {}).get("type") == "evaluator":
            continue
        assert ours.master(*arguments) == theirs.master(*arguments)


def test_arguments_replace_what_stands_in_it() -> None:
    config = {"cluster": TWO}
    ours = resolver(config, task_type="worker", task_id=1, rpc_layer="x")
    assert ours.task() == Task("worker", 1)
    assert ours.cluster_spec() == TWO
    assert ours.master() == "x://host1:2222"
    ours.task_id = 0
    assert ours.task() == Task("worker", 0)


@pytest.mark.parametrize("text", ["", "  ", "{}"])
def test_without_it_the_process_is_alone(text: str) -> None:
    ours = resolver(text)
    assert not ours.cluster_spec()
    assert ours.task() is None
    with join(ours) as node:
        assert (node.membership.rank, node.membership.world_size, node.listener) == (0, 1, None)


def with_task(task: object) -> dict[str, object]:
    return {"cluster": TWO, "task": task}


BAD = [
    ("{'cluster': {}}", "TF_CONFIG is not JSON: .*JSON requires double quotes. Write for example"),
    ('{"cluster": ', "TF_CONFIG is not JSON"),
    ("[1]", "TF_CONFIG is '\\[1\\]': JSON, but not an object"),
    ({"task": {"type": "worker", "index": 0}}, "TF_CONFIG has no 'cluster', only \\['task'\\]"),
    ({"cluster": TWO}, "TF_CONFIG has no 'task', only \\['cluster'\\]"),
    (with_task("worker"), "task in TF_CONFIG is 'worker'. Write"),
    (with_task({"index": 0}), "it has no 'type'"),
    (with_task({"type": "worker"}), "it has no 'index'"),
    (with_task({"type": "boss", "index": 0}), "'boss' is not a task type"),
    (with_task({"type": "master", "index": 0}), "Write 'chief'"),
    (with_task({"type": "worker", "index": 2}), "worker/2, but the cluster has only worker/0"),
    (with_task({"type": "worker", "index": -1}), "task.index in TF_CONFIG is -1"),
    (with_task({"type": "worker", "index": True}), "task.index in TF_CONFIG is True"),
    (with_task({"type": "worker", "index": 1.0}), "task.index in TF_CONFIG is 1.0"),
    (with_task({"type": "worker", "index": "one"}), "task.index in TF_CONFIG is 'one'"),
    ('{"cluster": ' + "[" * 100_000, "TF_CONFIG is nested too deeply"),
    ('{"task": {"index": ' + "9" * 5000 + "}}", "TF_CONFIG is not JSON: Exceeds the limit"),
    (with_task({"type": "worker", "index": "9" * 5000}), "task.index in TF_CONFIG is '999.*9\\.\\.\\.'. Write a whole"),
    (
        {"cluster": {"worker": {"9" * 5000: "a:1"}}, "task": {"type": "worker", "index": 0}},
        "Its keys are task indices",
    ),
    (with_task({"type": "chief", "index": 0}), "the cluster has no 'chief' tasks"),
    (with_task({"type": "ps", "index": 0}), "the cluster has no 'ps' tasks"),
    ({"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}, "neither chief nor worker"),
    (
        {"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}},
        "In TF_CONFIG cluster.worker\\[0\\]",
    ),
    ({"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}, "the same address"),
    (
        {"cluster": {"worker": ["a:1/"]}, "task": {"type": "worker", "index": 0}},
        "Write only host and port: 'a:1'",
    ),
    ({"cluster": {"wrk": ["a:1"]}, "task": {"type": "worker", "index": 0}}, "'wrk' is not a task type"),
    ({"cluster": [], "task": {"type": "worker", "index": 0}}, "the cluster is \\[\\]"),
    (
        {"cluster": {"worker": {"0": "a:1", "2": "b:1"}}, "task": {"type": "worker", "index": 0}},
        "absent in between",
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_an_error_that_says_what_to_write(config: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        join(resolver(config))


def test_spaces_around_addresses_do_not_matter() -> None:
    config = {"cluster": {"worker": [" host0:2222", "host1:2222 "]}, "task": {"type": "worker", "index": 0}}
    assert resolver(config).cluster_spec() == TWO


def test_the_variable_is_read_each_time() -> None:
    environ = {"TF_CONFIG": json.dumps(with_task({"type": "worker", "index": 0}))}
    ours = TFConfigClusterResolver(environ=environ)
    assert ours.task_id == 0
    environ["TF_CONFIG"] = json.dumps(with_task({"type": "worker", "index": 1}))
    assert ours.task_id == 1
