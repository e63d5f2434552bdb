"""Dtype policies: 16 bits differ in their last digits with the order of summation, so these compare loosely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.training.scenarios.common import CLASSES, FEATURES, compiled, features, fitted, labels
from tests.training.scenarios.registry import EACH_KIND, ONE_BACKEND, Setting, scenario


@contextmanager
def _policy(name: str) -> Iterator[None]:
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_dtype_policy(before)


class NotedScales(keras.callbacks.Callback):
    """Records the loss scale and the number of optimizer updates after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[tuple[float, int]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        self.scales.append((float(optimizer.dynamic_scale), int(optimizer.iterations)))


@scenario(tolerance=2e-2)
def mixed_float16(setting: Setting) -> dict[str, Any]:
    with _policy("mixed_float16"):
        assert isinstance(compiled(setting).optimizer, keras.optimizers.LossScaleOptimizer)
        # A scale at which nothing overflows. No accuracy: one sample at the edge is 3 %.
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=256.0)
        return fitted(compiled(setting, optimizer=optimizer))


@scenario(tolerance=2e-2, quick=ONE_BACKEND)
def mixed_float16_where_only_the_sum_over_all_samples_overflows(setting: Setting) -> dict[str, Any]:
    """At other steps than a replica's own part of it."""

    def build() -> Any:
        hidden = layers.Dense(4, kernel_initializer=keras.initializers.Constant(0.1))
        out = layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.5), dtype="float32")
        return keras.Sequential([keras.Input((FEATURES,)), hidden, out])

    noting = NotedScales()
    x = 1 + 0.1 * features()
    # Each gradient of the hidden layer is then 2.75 times the scale: 90,000 at first, which float16 does not have.
    y = 0.2 * x.sum(axis=1, keepdims=True) + 2.75
    with _policy("mixed_float16"):
        model = compiled(setting, build, optimizer=keras.optimizers.SGD(0.002, momentum=0.9), loss="mse")
        found = fitted(model, x, y, callbacks=[noting])
    assert noting.scales[:2] == [(2.0**14, 0), (2.0**14, 1)], "the first step is the only one that overflows"
    return {**found, "scales": noting.scales}


@scenario(tolerance=2e-2, quick=ONE_BACKEND)
def mixed_float16_of_a_layer_that_is_called_twice(setting: Setting) -> dict[str, Any]:
    """Float16 has the gradient of each call, and the sum of both is one of float32, in one process as well."""

    def build() -> Any:
        hidden = layers.Dense(4, kernel_initializer=keras.initializers.Constant(0.1))
        out = layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.5), dtype="float32")
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, out(layers.Add()([hidden(inputs), hidden(inputs)])))

    noting = NotedScales()
    x = 1 + 0.1 * features()
    y = 0.4 * x.sum(axis=1, keepdims=True) + 1.4
    with _policy("mixed_float16"):
        model = compiled(setting, build, optimizer=keras.optimizers.SGD(0.002, momentum=0.9), loss="mse")
        found = fitted(model, x, y, callbacks=[noting])
    assert noting.scales[0] == (2.0**15, 1), "nothing overflows"
    return {**found, "scales": noting.scales}


@scenario(tolerance=5e-2)
def mixed_bfloat16(setting: Setting) -> dict[str, Any]:
    with _policy("mixed_bfloat16"):
        return fitted(compiled(setting))


class Penalized(layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(ops.cast(0.1 * ops.mean(ops.square(inputs)), "float32"))  # TensorFlow adds up one dtype
        return inputs


@scenario(tolerance=5e-2, quick=("torch",))
def mixed_bfloat16_with_an_added_loss(setting: Setting) -> dict[str, Any]:
    """A mean of numbers with eight bits is not quite the mean of its parts' means."""

    def build() -> Any:
        hidden = [layers.Dense(8, activation="tanh"), Penalized()]
        return keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES, activation="softmax")])

    with _policy("mixed_bfloat16"):
        return fitted(compiled(setting, build))


@scenario(tolerance=1e-1)
def bfloat16_weights(setting: Setting) -> dict[str, Any]:
    """The gradients themselves have 16 bits."""
    with _policy("bfloat16"):
        return fitted(compiled(setting))


@scenario(tolerance=1e-5, backends=("tensorflow", "torch"))
def float64(setting: Setting) -> dict[str, Any]:
    with _policy("float64"):
        return fitted(compiled(setting))


def _float8_classifier() -> Any:
    # No biases: Keras casts them to bfloat16, and so rounds their gradients, which are sums over a part of the batch.
    parts = [
        layers.Dense(8, "tanh", use_bias=False),
        layers.Reshape((2, 4)),
        layers.EinsumDense("abc,cd->abd", (2, 3)),
        layers.Flatten(),
        layers.Dense(CLASSES, use_bias=False),
    ]
    model = keras.Sequential([keras.Input((FEATURES,)), *parts])
    model.quantize("float8")
    return model


def _trained_in_float8(setting: Setting, batch_size: int = 11, epochs: int = 2, **arguments: Any) -> dict[str, Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(setting, arguments.pop("build", _float8_classifier), loss=loss, **arguments)
    model.fit(features(), labels(), batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    scales = [v for v in model.trainable_variables if v.overwrite_with_gradient]
    assert len(scales) == 18
    assert all(np.any(keras.ops.convert_to_numpy(v) != 1) for v in scales)
    optimizer = [keras.ops.convert_to_numpy(variable) for variable in model.optimizer.variables]
    evaluated = model.evaluate(features(), labels(), verbose=0)
    return {"weights": model.get_weights(), "optimizer": optimizer, "evaluate": evaluated}


@scenario(quick=EACH_KIND)
def float8(setting: Setting) -> dict[str, Any]:
    """The largest value of the global batch decides on the scales, and gradients are rounded as they are there."""
    return _trained_in_float8(setting)


@scenario()
def float8_with_ranks_without_samples(setting: Setting) -> dict[str, Any]:
    return _trained_in_float8(setting, batch_size=16)


@scenario()
def float8_with_accumulated_gradients(setting: Setting) -> dict[str, Any]:
    """Those of the last batch are left in the optimizer."""
    return _trained_in_float8(setting, epochs=3, optimizer=keras.optimizers.SGD(0.2, gradient_accumulation_steps=2))


@scenario(quick=ONE_BACKEND, tolerance=1e-2)
def quantized_with_an_operation_between_layers(setting: Setting) -> dict[str, Any]:
    """The step is tried, and biases, which Keras rounds to bfloat16, are not taken for what relates samples."""

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        hidden = ops.tanh(layers.Dense(8)(inputs)) * 2.0 + 1.0
        return keras.Model(inputs, layers.Dense(CLASSES)(layers.Dense(8, "tanh")(hidden)))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = {}
    for mode in ("float8", "int8"):
        model = compiled(setting, build)
        model.quantize(mode)
        with setting.scope():
            model.compile(keras.optimizers.SGD(0.1), loss)
        if mode == "int8":
            for layer in model.layers[-2:]:
                layer.enable_lora(2)
        found[mode] = fitted(model, batch_size=11)["history"]
    return found
