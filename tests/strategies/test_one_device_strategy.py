"""`OneDeviceStrategy` computes where it was told to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.errors import ConfigurationError
from tests.support import fork_server
from tests.support.backends import BACKENDS
from tests.support.commands import finish
from tests.support.programs import environment

PROGRAM = """
import json, sys
import keras, numpy as np, phalanx

found = {}
second = keras.backend.backend() == "jax"
if second:  # it can have two CPU devices
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
strategy = phalanx.OneDeviceStrategy("/cpu:1" if second else "/cpu:0")
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.ones((20, 3), "float32")
model.fit(x, x[:, :1], verbose=0)
model.evaluate(x, x[:, :1], verbose=0)
found["weights"] = str(model.weights[0].value.device)
found["outputs"] = str(strategy.run(lambda: model(keras.ops.ones((1, 3)))).device)
found["local"] = strategy.local_devices
if second:
    found["outside"] = str(keras.ops.ones(()).device)
    try:
        phalanx.OneDeviceStrategy("cpu:7")
    except phalanx.ConfigurationError as error:
        found["absent"] = str(error)
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_models_lie_and_compute_on_the_device(backend: str, tmp_path: Path) -> None:
    program, out = tmp_path / "program.py", tmp_path / "found.json"
    program.write_text(PROGRAM)
    code, output = finish(
        [sys.executable, str(program), str(out)], environment(backend), bound_s=300.0, start=fork_server.popen
    )
    assert code == 0, output
    found: dict[str, Any] = json.loads(out.read_text())
    expected = "cpu:1" if backend == "jax" else "cpu"
    assert expected in found["weights"].lower()
    assert expected in found["outputs"].lower()
    if backend == "jax":
        assert found["local"] == ["/cpu:1"]
        assert "cpu:0" in found["outside"].lower()
        assert found["absent"].startswith("OneDeviceStrategy('cpu:7'): jax has no device cpu:7")


@pytest.mark.parametrize(("device", "message"), [("/gpu:77", "does not exist"), ("chip", "is not a device")])
def test_devices_that_are_not_there(device: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        phalanx.OneDeviceStrategy(device)
