"""Models, strategies and figures on a GPU. Skipped unless `TEST_ON_GPU` is set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.devices import gpu_figures
from tests.support.backends import BACKENDS, ON_GPU
from tests.support.commands import finish
from tests.support.programs import environment

pytestmark = [pytest.mark.skipif(not ON_GPU, reason="needs a GPU and TEST_ON_GPU=1"), pytest.mark.timeout(600)]

ONE_DEVICE = """
import json, sys
import keras, numpy as np, phalanx

strategy = phalanx.OneDeviceStrategy("/gpu:0")
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.ones((20, 3), "float32")
model.fit(x, x[:, :1], verbose=0)
found = {
    "weights": str(model.weights[0].value.device),
    "outputs": str(strategy.run(lambda: model(keras.ops.ones((1, 3)))).device),
    "local": strategy.local_devices,
}
json.dump(found, open(sys.argv[1], "w"))
"""

MIRRORED = """
import json, sys
import keras, numpy as np, phalanx

strategy = phalanx.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.ones((20, 3), "float32")
losses = model.fit(x, x[:, :1], epochs=2, verbose=0).history["loss"]
found = {"weights": str(model.weights[0].value.device), "replicas": strategy.num_replicas_in_sync, "losses": losses}
json.dump(found, open(sys.argv[1], "w"))
"""


def _found(program_text: str, backend: str, folder: Path) -> dict[str, Any]:
    program, out = folder / "program.py", folder / "found.json"
    program.write_text(program_text)
    command = [sys.executable, str(program), str(out)]
    code, output = finish(command, environment(backend), bound_s=300.0)
    assert code == 0, output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_device_strategy_computes_on_the_gpu(backend: str, tmp_path: Path) -> None:
    found = _found(ONE_DEVICE, backend, tmp_path)
    for place in ("weights", "outputs"):
        assert "cuda" in found[place].lower() or "gpu" in found[place].lower(), found
    assert found["local"] == ["/gpu:0"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_mirrored_strategy_has_a_replica_for_each_gpu(backend: str, tmp_path: Path) -> None:
    from phalanx.config.environment import process_environment
    from phalanx.devices.gpu_count import count_gpus

    found = _found(MIRRORED, backend, tmp_path)
    assert "cuda" in found["weights"].lower() or "gpu" in found["weights"].lower(), found
    assert found["replicas"] == count_gpus(process_environment())
    assert found["losses"][1] < found["losses"][0]


def test_figures_come_from_the_driver() -> None:
    figures = gpu_figures.read()
    assert figures is not None
    assert "NVIDIA" in figures.name
    assert 0 <= figures.utilization <= 1
    assert 0 < figures.memory < figures.memory_total
