"""A program on four CPU devices of one process: what its steps hold and move. It prints nothing if all is well."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx.engines.spmd.step_programs import uncompiled_step
from phalanx.errors import ConfigurationError
from tests.support.seeds import set_random_seed

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
        step = uncompiled_step(model, strategy.placement, (batch, batch, None))
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


def check_a_loop_of_the_program() -> None:
    """It takes the steps of `train_on_batch`, and leaves weights and optimizer state where they lie."""
    strategy = phalanx.ShardedStrategy(1)
    set_random_seed(1)
    with strategy.scope():
        model, other = perceptron(), perceptron()
        other.set_weights(model.get_weights())
        model.optimizer.build(model.trainable_variables)
    optimizer = model.optimizer

    @jax.jit
    def step(weights: Any, state: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            outputs, _ = model.stateless_call(weights, [], x)
            losses = keras.ops.mean(keras.ops.square(outputs - x), axis=-1)
            own = phalanx.compute_average_loss(losses)
            return phalanx.get_replica_context().all_reduce("SUM", own)

        value, gradients = jax.value_and_grad(loss)(weights)
        return value, *optimizer.stateless_apply(state, gradients, weights)

    weights = [variable.value for variable in model.trainable_variables]
    state = [variable.value for variable in optimizer.variables]
    before = [value.sharding for value in [*weights, *state]]

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> Any:
            return (X[number * 24 : (number + 1) * 24],)  # the last one has 16 rows

    for (x,) in strategy.experimental_distribute_dataset(Batches()):
        assert len(x.sharding.device_set) == DEVICES
        value, weights, state = strategy.run(step, (weights, state, x))
        np.testing.assert_allclose(value, other.train_on_batch(np.asarray(x), np.asarray(x)), rtol=1e-4)
    for value, sharding in zip([*weights, *state], before, strict=True):
        assert value.sharding.is_equivalent_to(sharding, value.ndim), (value.sharding, sharding)
    for mine, theirs in zip(weights, other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    total = strategy.reduce("SUM", keras.ops.ones((4, 2)), axis=0)
    np.testing.assert_array_equal(total, [4.0, 4.0])


def check_the_engine_of_mirrored_strategy() -> None:
    """Where there are several GPUs, MirroredStrategy chooses one program by itself."""
    assert phalanx.MirroredStrategy(1).placement is None
    with mock.patch("phalanx.strategies.mirrored_strategy.count_gpus", return_value=2):
        assert phalanx.MirroredStrategy().num_replicas_in_sync == DEVICES
    assert phalanx.MirroredStrategy(["/cpu:0", "CPU:2"], engine="spmd").local_devices == ("cpu:0", "cpu:2")
    with pytest.raises(ConfigurationError, match="JAX sees cpu:0, cpu:1"):
        phalanx.MirroredStrategy(["gpu:0"], engine="spmd")


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
    check_a_loop_of_the_program()
    check_the_engine_of_mirrored_strategy()
    check_refusals()
