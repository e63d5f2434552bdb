"""Programs that change their optimizer or model: between calls of `fit`, from callbacks, and by learning-rate schedules
that Keras cannot recreate. The optimizer that updates is the program's own object, in its state at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, optimizers

from tests.training.scenarios.common import BATCH, CLASSES, FEATURES, compiled, features, fitted, fitted_on, labels
from tests.training.scenarios.registry import EACH_KIND, ONE_BACKEND, Setting, add, scenario


class _Bare(optimizers.schedules.LearningRateSchedule):
    """Cannot be serialized, because it has no `get_config`."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: Any) -> Any:
        return self.rate * keras.ops.exp(-0.3 * keras.ops.cast(step, "float32"))


class _Unregistered(_Bare):
    """Cannot be deserialized, because the class is not registered with Keras."""

    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate}


def _state(model: Any) -> dict[str, Any]:
    return {"optimizer": [keras.ops.convert_to_numpy(variable.value) for variable in model.optimizer.variables]}


def _with_rate(rate: Callable[[], Any]) -> Callable[[Setting], dict[str, Any]]:
    def run(setting: Setting) -> dict[str, Any]:
        model = compiled(setting, optimizer=optimizers.Adam(rate()))
        first = fitted(model)
        batch = model.train_on_batch(features(BATCH), labels(BATCH))
        return {"first": first, "batch": batch, "second": fitted(model)} | _state(model)

    return run


RATES: dict[str, Callable[[], Any]] = {
    "without_get_config": lambda: _Bare(0.1),
    "not_registered": lambda: _Unregistered(0.1),
    "function": lambda: lambda: keras.ops.convert_to_tensor(0.05, "float32"),
}
for _name, _rate in RATES.items():
    add(f"learning_rate_{_name}", _with_rate(_rate), quick=ONE_BACKEND if _name == "without_get_config" else ())


@scenario(quick=ONE_BACKEND)
def learning_rate_becomes_a_schedule(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=optimizers.Adam(0.05))
    first = fitted(model)
    model.optimizer.learning_rate = optimizers.schedules.ExponentialDecay(0.3, 2, 0.5)
    return {"first": first, "second": fitted(model)} | _state(model)


HYPERPARAMETERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    # The optimizer, and the new values of its attributes.
    "momentum": (lambda: optimizers.SGD(0.1, momentum=0.5), {"momentum": 0.9}),
    "nesterov": (lambda: optimizers.SGD(0.1, momentum=0.9), {"nesterov": True}),
    "beta_1": (lambda: optimizers.Adam(0.05), {"beta_1": 0.5, "epsilon": 1e-2}),
    "weight_decay": (lambda: optimizers.AdamW(0.05, weight_decay=0.01), {"weight_decay": 0.5}),
    "clipnorm": (lambda: optimizers.SGD(0.5), {"clipnorm": 0.01}),
    "clipvalue": (lambda: optimizers.Adam(0.05, clipvalue=1.0), {"clipvalue": 0.001}),
}
MODES = ("compiled", "eagerly")


def _changed(
    make: Callable[[], Any], values: dict[str, Any], *, eagerly: bool, from_callback: bool
) -> Callable[[Setting], dict[str, Any]]:
    def run(setting: Setting) -> dict[str, Any]:
        model = compiled(setting, optimizer=make(), run_eagerly=eagerly)

        def change(*_: Any) -> None:
            for name, value in values.items():
                setattr(model.optimizer, name, value)

        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=change)] if from_callback else []
        first = fitted(model, callbacks=callbacks)
        change()
        second = fitted(model)
        return {"first": first, "second": second} | _state(model)

    return run


for _name, (_make, _values) in HYPERPARAMETERS.items():
    for _mode in MODES:
        for _when in ("epochs", "fits"):
            add(
                f"hyperparameter_{_name}_{_mode}_between_{_when}",
                _changed(_make, _values, eagerly=_mode == "eagerly", from_callback=_when == "epochs"),
                quick=("torch",) if (_name, _mode, _when) == ("beta_1", "compiled", "epochs") else (),
            )


@scenario(quick=("jax",))
def hyperparameter_between_fits_of_other_batches(setting: Setting) -> dict[str, Any]:
    """JAX recompiles for a different batch size, and only then sees the value."""
    model = compiled(setting, optimizer=optimizers.SGD(0.1, momentum=0.5))
    found = {"first": fitted(model)}
    model.optimizer.momentum = 0.9
    found["other size"] = fitted(model, batch_size=11)
    model.optimizer.momentum = 0.0
    return found | {"sizes as before": fitted(model), "other again": fitted(model, batch_size=3)} | _state(model)


@scenario()
def loss_scale_factor_between_fits_of_other_batches(setting: Setting) -> dict[str, Any]:
    """On JAX, batches of 7 samples get the new factor, although their parts on some replicas are as large as those of
    8, which keep the old one."""
    model = compiled(setting, optimizer=optimizers.SGD(0.1, loss_scale_factor=16.0))
    found = {"first": fitted(model, batch_size=8)}
    model.optimizer.loss_scale_factor = None
    return found | {"other": fitted(model, batch_size=7), "as before": fitted(model, batch_size=8)} | _state(model)


class _Times(layers.Layer):
    """Multiplies by an attribute, whose value a compiled step keeps."""

    factor = 1.0

    def call(self, inputs: Any) -> Any:
        return self.factor * inputs


def _with_attribute(setting: Setting, data: Callable[[int], dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
    """Return the results of a model whose layer changes before batches of each of these sizes.

    Args:
        data: Function that returns the arguments of each method for batches of one size.
    """
    times = _Times()
    with setting.scope():
        inputs = keras.Input((FEATURES,))
        model = keras.Model(inputs, layers.Dense(CLASSES, "softmax")(times(inputs)))
        model.compile(optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    found: dict[str, Any] = {}
    for number, size in enumerate(sizes):
        times.factor = 3.0 - number
        given = data(size)
        found[f"fit {number}"] = model.fit(**given, shuffle=False, verbose=0).history
        found[f"evaluate {number}"] = model.evaluate(**given, verbose=0)
        given.pop("y", None)
        found[f"predict {number}"] = model.predict(**given, verbose=0)
    return found | {"weights": model.get_weights()}


@scenario(quick=("jax", "tensorflow"))
def attribute_between_calls_with_other_batches(setting: Setting) -> dict[str, Any]:
    """As `loss_scale_factor_between_fits_of_other_batches`, with an attribute of the program, in all methods.

    On TensorFlow, Keras compiles once for arrays. Parts of a different size occur in the second call.
    """

    def arrays(size: int) -> dict[str, Any]:
        return {"x": features(24), "y": labels(24), "batch_size": size}

    return _with_attribute(setting, arrays, [8, 7, 8])


@scenario(backends=("tensorflow",))
def attribute_between_calls_with_datasets_of_other_batches(setting: Setting) -> dict[str, Any]:
    """Keras recompiles for a dataset with a different batch size, if the size is known."""
    import tensorflow as tf

    def dataset(size: int) -> dict[str, Any]:
        data = tf.data.Dataset.from_tensor_slices((features(24), labels(24)))
        return {"x": data.batch(size, drop_remainder=True)}

    return _with_attribute(setting, dataset, [8, 7, 8])


@scenario()
def schedule_between_fits_of_other_inputs(setting: Setting) -> dict[str, Any]:
    """On TensorFlow, Keras recompiles if its dataset specifies more or less about the batch size than before, and only
    then sees the schedule."""
    x, y = features(BATCH), labels(BATCH)

    def batches(size: int) -> Iterator[Any]:
        for start in range(0, BATCH, size):
            yield x[start : start + size], y[start : start + size]

    model = compiled(setting, optimizer=optimizers.SGD(0.1))
    found = {"arrays": fitted(model, x, y, batch_size=8)}
    model.optimizer.learning_rate = optimizers.schedules.ExponentialDecay(0.3, 2, 0.5)
    found["same size"] = fitted(model, x, y, batch_size=8)
    found["size unknown"] = fitted_on(model, batches(4), epochs=1, steps_per_epoch=4)
    model.optimizer.weight_decay = 0.1
    found["single batch"] = model.train_on_batch(x[:4], y[:4])
    found["size unknown again"] = fitted_on(model, batches(6), epochs=1, steps_per_epoch=3)
    return found | {"arrays again": fitted(model, x, y, batch_size=8)} | _state(model)


@scenario(quick=ONE_BACKEND)
def loss_scale_of_a_model_without_trained_weights(setting: Setting) -> dict[str, Any]:
    """Keras applies the optimizer on JAX, and not on PyTorch. (On TensorFlow, it has not built it.)"""
    scaled = optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=16.0, dynamic_growth_steps=3)
    model = compiled(setting, optimizer=scaled)
    found = {"first": fitted(model)}
    model.trainable = False
    scaled = optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=16.0, dynamic_growth_steps=3)
    with setting.scope():
        model.compile(scaled, "sparse_categorical_crossentropy")
    return found | {"frozen": fitted(model), "scale": float(getattr(scaled, "dynamic_scale", 16.0))}


@scenario(backends=("tensorflow", "torch"), quick=("tensorflow",))
def weights_frozen_without_compiling_again(setting: Setting) -> dict[str, Any]:
    """On TensorFlow, this takes effect when Keras recompiles; on PyTorch, at once. (On JAX, Keras raises an error.)"""
    x, y = features(BATCH), labels(BATCH)
    model = compiled(setting, optimizer=optimizers.Adam(0.05))
    found = {"first": fitted(model, x, y, batch_size=8)}
    model.layers[0].trainable = False
    found |= {"frozen": fitted(model, x, y, batch_size=8), "other size": fitted(model, x, y, batch_size=5)}
    model.layers[0].trainable = True
    return found | {"trained again": fitted(model, x, y, batch_size=8), "single": model.train_on_batch(x, y)}


@scenario(quick=EACH_KIND)
def program_changes_the_model_between_epochs_and_fits(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=optimizers.Adam(0.05))
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    set_bias = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.layers[1].bias.assign(np.ones(3, "float32"))
    )
    first = fitted(model, callbacks=[halve, set_bias])
    batch = model.train_on_batch(features(BATCH), labels(BATCH))
    model.set_weights([weight * 0.5 for weight in model.get_weights()])
    model.optimizer.learning_rate = 0.1
    return {"first": first, "batch": batch, "second": fitted(model)} | _state(model)


@scenario(plain=False, quick=("jax",))
def fit_that_an_error_ends_keeps_its_last_step(setting: Setting) -> dict[str, Any]:
    """Weights and the optimizer's state include the steps before the error."""

    class Broken(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            if index == 3 and broken:
                raise OSError("the disk is gone")
            return features(BATCH, seed=index), labels(BATCH, seed=index)

    model, twin = (compiled(setting, optimizer=optimizers.Adam(0.05)) for _ in range(2))
    twin.set_weights(model.get_weights())
    broken = True
    with pytest.raises(OSError, match="the disk is gone"):
        model.fit(Broken(), shuffle=False, verbose=0)
    broken = False
    twin.fit(Broken(), shuffle=False, steps_per_epoch=3, verbose=0)
    found = [{"weights": own.get_weights()} | _state(own) for own in (model, twin)]
    for own, others in zip(*(keras.tree.flatten(each) for each in found), strict=True):
        np.testing.assert_allclose(own, others, rtol=1e-5, atol=1e-7)
    return found[0]


class _Branching(keras.Model):
    """Has a layer that some batches do not use, and one that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = (
            layers.Dense(8, activation="tanh"),
            layers.Dense(8),
            layers.Dense(3, "softmax"),
        )
        self.unused = layers.Dense(2)

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.extra.build((None, 8))
        self.last.build((None, 8))
        self.unused.build((None, 8))

    def call(self, x: Any) -> Any:
        hidden = self.first(x)
        if float(x[0, 0]) > 0:
            hidden = hidden + self.extra(hidden)
        return self.last(hidden)


@scenario(backends=("torch",), quick=("torch",))
def optimizer_leaves_alone_what_has_no_gradient(setting: Setting) -> dict[str, Any]:
    """PyTorch has no gradient if a loss does not depend on a variable. Variable and moments then stay unchanged."""
    model = compiled(setting, _Branching, optimizer=optimizers.AdamW(0.05, weight_decay=0.1), metrics=["accuracy"])
    model.build((None, 6))
    x = features()
    x[:, 0] = np.where(np.arange(len(x)) // BATCH == 1, 1, -1)  # whether the batch uses the layer
    return fitted(model, x) | {"again": fitted(model, x)} | _state(model)
