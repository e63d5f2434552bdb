"""Keras on JAX knows the losses that a layer has added by their `id`, also when another layer's new loss has got it."""

from __future__ import annotations

import pytest

from tests.support.backends import BACKENDS
from tests.support.programs import check_python

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="needs JAX")

MODEL = """
import keras, numpy as np
import phalanx

losses = [keras.ops.convert_to_tensor(np.float32(value)) for value in (1, 10)]


class AddsInTurn(keras.layers.Layer):
    # Adds one of the losses, and in its next call the other, which the other layer has added before.

    def __init__(self, number):
        super().__init__()
        self.number = number

    def call(self, x):
        self.number = 1 - self.number
        self.add_loss(losses[self.number])
        return x


x = np.zeros((4, 2), np.float32)


def layers():
    return [keras.Input((2,)), AddsInTurn(0), AddsInTurn(1), keras.layers.Dense(2)]
"""

FIT = """
with phalanx.MirroredStrategy(devices=1).scope():
    model = keras.Sequential(layers())
    model.compile("sgd", "mse", run_eagerly=True)
for _ in range(3):
    assert model.fit(x, x, verbose=0).history == {"loss": [11.0]}
    assert model.evaluate(x, x, verbose=0) == 11.0
"""

SEVERAL_CALLS_IN_A_STEP = """
class Thrice(keras.Sequential):
    def train_step(self, state, data):
        added = [self.stateless_call(*state[:2], data[0], return_losses=True)[-1] for _ in range(3)]
        assert [sum(map(float, losses)) for losses in added] == [11.0] * 3, added
        print("three calls", flush=True)
        return super().train_step(state, data)


with phalanx.MirroredStrategy(devices=1).scope():
    model = Thrice(layers())
    model.compile("sgd", "mse", run_eagerly=True)
model.fit(x, x, verbose=0)
"""

HOROVOD = """
import phalanx.horovod.keras as hvd

hvd.init()
model = keras.Sequential(layers())
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse", run_eagerly=True)
for _ in range(3):
    assert model.fit(x, x, verbose=0).history == {"loss": [11.0]}
"""


@pytest.mark.parametrize("program", [FIT, SEVERAL_CALLS_IN_A_STEP, HOROVOD], ids=["fit", "several_calls", "horovod"])
def test_no_loss_is_taken_for_one_of_a_former_call(program):
    check_python("-c", MODEL + program, backend="jax")
