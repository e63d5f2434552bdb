"""Keras on JAX knows the losses that a layer has added by their `id`, also when another layer's new loss has got it."""

from __future__ import annotations

import pytest

from tests.support.backends import BACKENDS
from tests.support.programs import check_python

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="needs JAX")

PROGRAM = """
import keras, numpy as np
from phalanx.engines import make_engine
from phalanx.engines.local_ranks import LocalRanks


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
layers = [AddsInTurn(0), AddsInTurn(1), keras.layers.Dense(2)]
model = keras.Sequential([keras.Input((2,)), *layers])
model.compile("sgd", "mse", run_eagerly=True)
ranks = LocalRanks()
engine = make_engine(model, ranks)
engine.build((x, x, None))
engine.metric_rules.decide(engine.metric_rules.rules)
ranks.be_whole()
for step in (engine.train, engine.test):
    for _ in range(3):
        model.reset_metrics()
        engine.begin()
        step((x, x, None), 1.0)
        engine.end()
        assert model.get_metrics_result()["loss"] == 11.0, step
"""


def test_no_loss_is_taken_for_one_of_a_former_call():
    check_python("-c", PROGRAM, backend="jax")
