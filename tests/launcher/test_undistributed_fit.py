"""A program that forgets its strategy is told so."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from phalanx.runtime import undistributed_fit
from tests.support import fork_server
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import finish
from tests.support.programs import environment

PROGRAM = """
import sys
import keras, numpy as np, phalanx

strategy = phalanx.MultiWorkerMirroredStrategy() if "--strategy" in sys.argv else None
model = keras.Sequential([keras.layers.Dense(1)], name="forgotten")
model.compile("sgd", "mse")
for _ in range(2):
    model.train_on_batch(np.ones((8, 2)), np.ones((8, 1)))
model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
if strategy is not None:
    with strategy.scope():
        scoped = keras.Sequential([keras.layers.Dense(1)], name="scoped")
        scoped.compile("sgd", "mse")
    scoped.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
"""


@pytest.mark.parametrize("arguments", [[], ["--strategy"]])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_outside_of_every_strategy_is_warned_of_once(
    backend: str, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "phalanx", "run", "--workers", "2", str(tmp_path / "program.py"), *arguments]
    code, output = finish(command, environment(backend), bound_s=200, start=fork_server.popen)
    assert code == 0, output
    warnings = [line for line in output.splitlines() if "belongs to no strategy" in line]
    assert [line.partition(" the model ")[0] for line in warnings] == ["[worker/0] train_on_batch() of 'forgotten':"]
    assert "each of the 2 workers that calls this trains its own copy" in warnings[0]


LOOP = """
import keras, numpy as np, sys

if "--joins" in sys.argv:
    import phalanx

    phalanx.MultiWorkerMirroredStrategy()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD()
optimizer.build(model.trainable_variables)
optimizer.apply([keras.ops.ones(v.shape) for v in model.trainable_variables])
"""


@pytest.mark.parametrize("joins", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_custom_loop_without_a_strategy_is_warned_of_at_its_end(joins: bool, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LOOP)
    command = [sys.executable, "-m", "phalanx", "run", "--workers", "2", str(tmp_path / "program.py")]
    # Not forked: the template of the fork server has imported all of Phalanx.
    code, output = finish([*command, *["--joins"] * joins], environment(FIRST), bound_s=200)
    assert code == 0, output
    warning = "[worker/0] The program has created no strategy, so its 2 workers did not train together"
    assert output.count("did not train together") == output.count(warning) == (0 if joins else 1), output


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Has the warnings; this process is the first of three workers, and has imported Keras with the real modules."""
    import keras  # noqa: F401

    monkeypatch.setattr(undistributed_fit, "_has_warned", False)
    caplog.set_level(logging.WARNING)
    _set_task(monkeypatch, {"worker": ["a:1", "b:1", "c:1"]}, "worker", 0)
    for module in undistributed_fit.HOROVOD:
        monkeypatch.delitem(sys.modules, module, raising=False)
    return caplog


def _set_task(monkeypatch: pytest.MonkeyPatch, cluster: dict[str, list[str]], kind: str, index: int) -> None:
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_the_first_worker_alone_warns(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    model = SimpleNamespace(name="m")
    workers = ["a:1", "b:1"]
    for cluster, kind, index in (
        ({"worker": workers}, "worker", 1),
        ({"chief": ["c:1"], "worker": workers}, "worker", 0),
        ({"worker": workers, "evaluator": ["e:1"]}, "evaluator", 0),
        ({"worker": workers[:1], "evaluator": ["e:1"]}, "worker", 0),
        ({"worker": workers, "ps": ["p:1"]}, "worker", 0),
    ):
        _set_task(monkeypatch, cluster, kind, index)
        undistributed_fit._warn_if_undistributed(model, "fit")
    monkeypatch.delenv("TF_CONFIG")
    undistributed_fit._warn_if_undistributed(model, "fit")
    assert log.messages == []
    _set_task(monkeypatch, {"chief": ["c:1"], "worker": workers}, "chief", 0)
    undistributed_fit._warn_if_undistributed(model, "fit")
    assert "each of the 3 workers" in log.messages[0]


def test_models_that_something_distributes_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    undistributed_fit._warn_if_undistributed(SimpleNamespace(name="m", **{undistributed_fit.OWNER: object()}), "fit")
    for name in undistributed_fit.HOROVOD:
        with monkeypatch.context() as context:
            context.setitem(sys.modules, name, ModuleType(name))
            undistributed_fit._warn_if_undistributed(SimpleNamespace(name="m"), "fit")
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "torch.distributed", SimpleNamespace(is_initialized=lambda: True))
        undistributed_fit._warn_if_undistributed(SimpleNamespace(name="m"), "fit")
    assert log.messages == []
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace())  # of a PyTorch that was built without it
    undistributed_fit._warn_if_undistributed(SimpleNamespace(name="m"), "fit")
    assert len(log.messages) == 1
