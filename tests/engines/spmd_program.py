"""A program on four CPU devices of one process: what its steps hold and move. It prints nothing if all is well."""

from __future__ import annotations

import re
from typing import Any

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx.engines.spmd.step_programs import ahead_of_time
from phalanx.errors import ConfigurationError

DEVICES = 4
WIDTH = 128
X = np.random.default_rng(0).normal(size=(64, WIDTH)).astype("float32")


def perceptron() -> Any:
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(WIDTH)])
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def check_argument_bytes() -> None:
    """Level 3 holds 12P/N bytes of weights and Adam's moments on each device, level 1 4P + 8P/N."""
    for level, expected in ((1, lambda p: 4 * p + 8 * p / DEVICES), (3, lambda p: 12 * p / DEVICES)):
        strategy = phalanx.ShardedStrategy(level)
        with strategy.scope():
            model = perceptron()
        batch = jax.ShapeDtypeStruct((DEVICES, WIDTH), "float32")
        step = ahead_of_time(model, strategy.placement, (batch, batch, None))
        held = step.function.lower(*step.arguments).compile().memory_analysis().argument_size_in_bytes
        np.testing.assert_allclose(held, expected(model.count_params()), rtol=0.05, err_msg=f"level {level}")


def check_where_variables_lie() -> None:
    """Before and after training, however they came there."""
    strategy = phalanx.ShardedStrategy()
    made_outside = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(512), keras.layers.Dense(WIDTH)])
    built = keras.optimizers.Adam()
    built.build(made_outside.trainable_variables)
    with strategy.scope():
        made_outside.compile(built, "mse")
        made_inside = perceptron()
    for model in (made_outside, made_inside):
        model.fit(X, X, batch_size=24, verbose=0)  # the last batch is no multiple of the devices
        for variable in [*model.trainable_variables, *model.optimizer.variables]:
            pieces = DEVICES if len(variable.shape) == 2 else 1
            piece = variable.value.addressable_shards[0].data
            assert piece.size * pieces == variable.value.size, variable.path
        for variable in model.metrics_variables:
            assert variable.value.is_fully_replicated


def check_refusals() -> None:
    mesh = keras.distribution.DeviceMesh((2, 2), ["data", "model"], keras.distribution.list_devices())
    misspelt = keras.distribution.LayoutMap(mesh)
    misspelt[".*denze.*kernel"] = (None, "model")
    odd = keras.distribution.LayoutMap(mesh)
    odd[".*kernel"] = ("model", None)

    def train_misspelt() -> None:
        with phalanx.ModelParallelStrategy(misspelt).scope():
            model = perceptron()
        model.fit(X, X, verbose=0)

    def make_odd() -> None:
        with phalanx.ModelParallelStrategy(odd).scope():
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])

    def train_small() -> None:
        with phalanx.ShardedStrategy().scope():
            model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(3)])
            model.compile("sgd", "mse")
        model.fit(X, X[:, :3], verbose=0)

    for refused, words in [
        (train_misspelt, "'.*denze.*kernel'"),
        (make_odd, "no multiple of 2"),
        (train_small, "No variable of the model"),
        (lambda: phalanx.ShardedStrategy(mesh_shape=(2, 3)), "needs 6 devices, and JAX sees 4"),
        (lambda: phalanx.ShardedStrategy(4), "level=4"),
        (lambda: phalanx.ModelParallelStrategy("yes"), "'yes'"),
        (lambda: phalanx.ModelParallelStrategy(odd, (4, 1)), "the shape (2, 2)"),
    ]:
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            refused()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    check_argument_bytes()
    check_where_variables_lie()
    check_refusals()
