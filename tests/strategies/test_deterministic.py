"""What cannot have the same bits for any number of workers is an error that says so."""

from __future__ import annotations

import sys

import pytest

from phalanx.devices import single_thread
from phalanx.errors import ConfigurationError
from tests.support import fork_server
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import finish
from tests.support.programs import environment

PROGRAM = """
import keras
import numpy as np

import phalanx

OPTIONS = phalanx.CommunicationOptions(deterministic=True)
backend = keras.backend.backend()
layers = keras.layers


def refused(error, action):
    try:
        action()
    except error as found:
        print("REFUSED", found)
    else:
        raise AssertionError(action)


for strategy in (lambda: phalanx.LocalSGDStrategy(4, communication_options=OPTIONS),
                 lambda: phalanx.DiLoCoStrategy(communication_options=OPTIONS),
                 lambda: phalanx.MultiWorkerMirroredStrategy(None, OPTIONS, compression="int8"),
                 lambda: phalanx.CommunicationOptions(deterministic=True, micro_batches=0),
                 lambda: phalanx.CommunicationOptions(micro_batches=8)):
    refused(phalanx.ConfigurationError, strategy)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, *arguments):
        if backend != "jax":
            return super().train_step(*arguments)
        logs, (weights, layers, optimizer, metrics) = super().train_step(*arguments)
        nothing = [keras.ops.zeros_like(weight) for weight in weights]
        weights, optimizer = self.optimizer.stateless_apply(optimizer, nothing, weights)  # a second update
        return logs, (weights, layers, optimizer, metrics)


class Noise(layers.Layer):
    def call(self, x):
        return x * keras.ops.convert_to_tensor(np.random.normal(), "float32")


def sequential(*parts, **options):
    model = keras.Sequential([keras.Input((3, 2)), *parts])
    model.compile("sgd", options.pop("loss", "mse"), **options)
    return model


strategy = phalanx.MultiWorkerMirroredStrategy(None, OPTIONS)
refused(phalanx.ConfigurationError, lambda: phalanx.MirroredStrategy(1))
refused(phalanx.UnsupportedError, lambda: strategy.run(print))
x = np.random.default_rng(0).normal(size=(8, 3, 2)).astype("float32")
with strategy.scope():
    stateful = keras.Sequential([keras.Input(batch_shape=(8, 3, 2)), layers.LSTM(2, stateful=True)])
    stateful.compile("sgd", "mse")
    models = [(stateful, x[:, 0]), (sequential(layers.Dense(2), loss=keras.losses.Dice()), x)]
    own = Own()
    own.compile("sgd", "mse")
    own(x)
    models.append((own, x))
    if backend == "torch":
        import torch

        wrapped = layers.TorchModuleWrapper(torch.nn.BatchNorm1d(3))
        models += [(sequential(layers.Dense(2), jit_compile=True), x), (sequential(wrapped, layers.Dense(2)), x)]
        models.append((sequential(Noise(), layers.BatchNormalization()), x))
for model, y in models:
    before = [np.array(value) for value in model.get_weights()]
    refused(phalanx.UnsupportedError, lambda: model.fit(x, y, batch_size=8, verbose=0))
    for old, new in zip(before, model.get_weights()):  # before the first update
        np.testing.assert_array_equal(old, new)
"""

LATE = """
import keras
import phalanx

keras.ops.convert_to_numpy(keras.ops.ones(1))
phalanx.MultiWorkerMirroredStrategy(None, phalanx.CommunicationOptions(deterministic=True))
"""


def quick_for_the_first(backends):
    return [name if name == FIRST else pytest.param(name, marks=pytest.mark.slow) for name in backends]


def run(program, backend):
    command, settings = [sys.executable, "-c", program], environment(backend)
    return finish(command, settings, bound_s=250, start=fork_server.popen)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", quick_for_the_first(BACKENDS))
def test_what_cannot_be_is_refused(backend, tmp_path) -> None:
    code, output = run(PROGRAM, backend)
    assert code == 0, output[-3000:]
    lines = [line for line in output.splitlines() if line.startswith("REFUSED")]
    assert len(lines) == 10 + (3 if backend == "torch" else 0)
    assert sum("deterministic=True" in line for line in lines) == len(lines) - 1  # one is about micro_batches alone


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"])
def test_a_strategy_that_comes_after_the_backends_threads_is_refused(backend, tmp_path) -> None:
    """PyTorch changes their number at any time."""
    code, output = run(LATE, backend)
    assert code == ConfigurationError.exit_code
    assert "too late" in output


def test_gpus_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(single_thread, "count_gpus", lambda environ: 2)
    with pytest.raises(ConfigurationError, match="this process has GPUs"):
        single_thread.compute_in_one_thread("jax", {})
