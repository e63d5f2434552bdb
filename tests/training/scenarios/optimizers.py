"""Optimizers and everything that they do beside the plain update, one scenario for each entry of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import optimizers

from tests.training.scenarios.common import BATCH, CLASSES, FEATURES, compiled, features, fitted, labels, observed
from tests.training.scenarios.registry import BACKENDS, ONE_BACKEND, Setting, add, scenario

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "weight_decay": lambda: optimizers.AdamW(0.05, weight_decay=0.1),
    "ema": lambda: optimizers.SGD(0.2, use_ema=True, ema_momentum=0.8),
    "ema_overwritten": lambda: optimizers.SGD(0.2, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "clipnorm": lambda: optimizers.SGD(0.2, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.SGD(0.2, global_clipnorm=0.05),
    "clipvalue": lambda: optimizers.SGD(0.2, clipvalue=0.01),
    "gradient_accumulation": lambda: optimizers.SGD(0.2, gradient_accumulation_steps=2),
    "accumulation_scaled": lambda: optimizers.SGD(0.2, gradient_accumulation_steps=4, loss_scale_factor=16.0),
    "schedule": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.3, 2, 0.5)),
    "warmup": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.0, 8, warmup_target=0.1, warmup_steps=3)),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.2), initial_scale=64.0, dynamic_growth_steps=2
    ),
    "rmsprop": lambda: optimizers.RMSprop(0.02, momentum=0.5, centered=True),
    "nadam_amsgrad": lambda: optimizers.Adam(0.02, amsgrad=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "lion": lambda: optimizers.Lion(0.01),
}


QUICK = ("global_clipnorm", "loss_scale")
"""Each takes a path of its own through a step, as does accumulation: see the scenarios of compression. The others
differ in Keras's arithmetic alone."""


def _scenario_of(make: Callable[[], Any]) -> Callable[[Setting], dict[str, Any]]:
    def run(setting: Setting) -> dict[str, Any]:
        model = compiled(setting, optimizer=make())
        found = fitted(model)
        found["optimizer"] = [keras.ops.convert_to_numpy(v.value) for v in model.optimizer.variables]
        return found

    return run


for _name, _make in OPTIMIZERS.items():
    add(f"optimizer_{_name}", _scenario_of(_make), quick=BACKENDS if _name in QUICK else ())


@scenario()
def optimizer_loss_scale_overflows(setting: Setting) -> dict[str, Any]:
    """One sample is infinite: every rank skips the step and halves the scale."""
    from tests.training.scenarios.common import features

    x = features()
    x[1] = 3e38
    make = optimizers.LossScaleOptimizer(optimizers.SGD(0.2), initial_scale=1024.0)
    model = compiled(setting, _linear, optimizer=make, loss="mse")
    model.fit(x, x[:, :1], batch_size=16, epochs=2, shuffle=False, verbose=0)
    return {
        "weights": model.get_weights(),
        "scale": float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale.value)),
        "iterations": int(keras.ops.convert_to_numpy(model.optimizer.iterations.value)),
    }


@scenario()
def optimizer_accumulates_over_an_overflow(setting: Setting) -> dict[str, Any]:
    """The step is left out of the four of an update, and the next one takes its place."""
    x = features()
    x[1] = 3e38
    inner = optimizers.SGD(0.05, gradient_accumulation_steps=4)
    make = optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    model = compiled(setting, _linear, optimizer=make, loss="mse")
    model.fit(x, x[:, 1:2], batch_size=16, epochs=3, shuffle=False, verbose=0)
    return {
        "weights": model.get_weights(),
        "optimizer": [keras.ops.convert_to_numpy(v.value) for v in model.optimizer.variables],
    }


@scenario(quick=("torch",))
def optimizer_accumulates_for_a_weight_without_axes(setting: Setting) -> dict[str, Any]:
    """An epoch ends between two updates."""

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        hidden = keras.layers.Reshape((3, 2))(inputs)
        hidden = keras.layers.Flatten()(keras.layers.Attention(use_scale=True)([hidden, hidden]))
        return keras.Model(inputs, keras.layers.Dense(CLASSES, activation="softmax")(hidden))

    return fitted(compiled(setting, build, optimizer=optimizers.SGD(0.2, gradient_accumulation_steps=2)))


@scenario(quick=ONE_BACKEND)
def optimizer_accumulates_for_weights_of_which_some_have_no_gradient(setting: Setting) -> dict[str, Any]:
    """The epoch ends between two updates, so what the replicas have summed goes to the optimizer, for a checkpoint."""

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        hidden = keras.layers.Dense(CLASSES)(inputs)
        unused = keras.layers.Dense(CLASSES, name="unused")(hidden)
        return keras.Model(inputs, [keras.layers.Dense(CLASSES, activation="softmax", name="used")(hidden), unused])

    loss = ["sparse_categorical_crossentropy", None]
    model = compiled(setting, build, optimizer=optimizers.SGD(0.2, gradient_accumulation_steps=4), loss=loss)
    y = labels(BATCH * 6)
    for _ in range(2):
        model.fit(features(BATCH * 6), [y, y], batch_size=BATCH, shuffle=False, verbose=0)
    state = [keras.ops.convert_to_numpy(variable.value) for variable in model.optimizer.variables]
    return {"optimizer": state, "weights": model.get_weights()}


class _Alternating(keras.layers.Layer):  # type: ignore[misc]
    """One of two layers of the same shape, in turn: another weight has a gradient in each step, if nothing is
    compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(CLASSES), keras.layers.Dense(CLASSES)]
        self.calls = 0

    def build(self, shape: Any) -> None:
        for part in self.parts:
            part.build(shape)

    def call(self, x: Any) -> Any:
        self.calls += 1
        return keras.ops.softmax(self.parts[self.calls % 2](x))

    def compute_output_shape(self, shape: Any) -> Any:
        return (*shape[:-1], CLASSES)


@scenario(quick=("torch",))
def optimizer_accumulates_for_other_weights_in_each_step(setting: Setting) -> dict[str, Any]:
    """As in plain Keras, the update drops what a weight has accumulated that has no gradient in its very step."""
    found = {}
    for steps in (2, 3):
        model = compiled(
            setting,
            lambda: keras.Sequential([keras.Input((FEATURES,)), _Alternating()]),
            optimizer=optimizers.SGD(0.2, gradient_accumulation_steps=steps),
        )
        model.layers[0].calls = 0  # plain Keras calls it once to build the model, and replicas test it
        model.fit(features(BATCH * 7), labels(BATCH * 7), batch_size=BATCH, shuffle=False, verbose=0)
        state = [keras.ops.convert_to_numpy(variable.value) for variable in model.optimizer.variables]
        found[str(steps)] = {"optimizer": state, "weights": model.get_weights()}
    return found


def _linear() -> Any:
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])


@scenario()
def optimizer_evaluated_after_ema(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5))
    return fitted(model) | observed(model)
