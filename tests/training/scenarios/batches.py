"""Methods that take one batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tests.training.scenarios.common import BATCH, FEATURES, compiled, features, fitted, labels, weights
from tests.training.scenarios.registry import BACKENDS, EACH_KIND, ONE_BACKEND, Setting, scenario


@scenario(quick=BACKENDS)
def single_batches(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=keras.optimizers.Adam(0.05), metrics=["accuracy"])
    x, y = features(7), labels(7)
    logs = [model.train_on_batch(x, y, sample_weight=weights(7), return_dict=True)]
    logs += [model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0, 2: 3.0}, return_dict=True)]
    logs += [model.train_on_batch(x[:1], y[:1], return_dict=True)]
    return {
        "train": logs,
        "list": [float(value) for value in model.train_on_batch(x, y)],
        "test": model.test_on_batch(x, y, return_dict=True),
        "predict": model.predict_on_batch(x),
        "predict_one": model.predict_on_batch(x[:1]),
        "weights": model.get_weights(),
    }


@scenario()
def single_batches_after_fit(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    model.fit(features(), labels(), batch_size=16, shuffle=False, verbose=0)
    return {"loss": float(model.train_on_batch(features(5), labels(5))), "weights": model.get_weights()}


@scenario()
def saved_while_gradients_accumulate(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=keras.optimizers.SGD(0.2, gradient_accumulation_steps=3))
    for _ in range(4):
        model.train_on_batch(features(8), labels(8))
    model.fit(features(28), labels(28), batch_size=8, shuffle=False, verbose=0)
    model.fit(features(32), labels(32), batch_size=8, shuffle=False, verbose=0)
    state = [ops.convert_to_numpy(variable) for variable in model.optimizer.variables]
    return {"weights": model.get_weights(), "optimizer": state}


@scenario()
def outputs_with_several_rows_for_each_sample(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, [inputs, keras.layers.Lambda(lambda x: ops.reshape(x, (-1, 2)))(inputs)])

    model = compiled(setting, build, loss=None)
    return {
        "predict": model.predict(features(), batch_size=BATCH, verbose=0),
        "one": model.predict_on_batch(features(1)),
    }


@scenario(quick=BACKENDS)
def outputs_without_a_row_for_each_sample(setting: Setting) -> dict[str, Any]:
    """As many columns as a replica has samples, a table of the features, and one number."""
    x = features(8)[:, :4]

    def build(function: Any) -> Any:
        inputs = keras.Input((4,))
        return keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Lambda(function)(inputs)])

    def predicted(function: Any) -> Any:
        model = compiled(setting, lambda: build(function), loss=None)
        return [
            model.predict(x, batch_size=4, verbose=0),
            model.predict(((x[:8],) for _ in range(3)), verbose=0),
            model.predict_on_batch(x),
            model.predict(x, batch_size=4, verbose=0),
        ]

    return {
        "transposed": predicted(ops.transpose),
        "correlated": predicted(lambda x: ops.matmul(ops.transpose(x), x)),
        "number": compiled(setting, lambda: build(ops.sum), loss=None).predict_on_batch(x),
    }


@scenario(quick=EACH_KIND)
def samples_along_another_axis_of_outputs(setting: Setting) -> dict[str, Any]:
    """The loss knows which axis it is."""

    class Closer(keras.losses.Loss):
        def call(self, y: Any, y_pred: Any) -> Any:
            return ops.relu(y_pred[0] - y_pred[1] + 1.0)

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        hidden = keras.layers.Dense(5)(inputs)
        return keras.Model(inputs, ops.stack([ops.sum(ops.square(hidden), 1), ops.sum(ops.abs(hidden), 1)], axis=0))

    model = compiled(setting, build, loss=Closer())
    y = np.zeros(32, "float32")
    found = fitted(model, features(32), y, validation_data=(features(32, seed=1), y))
    predicted = model.predict(features(16), batch_size=16, verbose=0)
    return {**found, "evaluate": model.evaluate(features(32), y, batch_size=16, verbose=0), "predict": predicted}


@scenario(quick=ONE_BACKEND)
def outputs_of_a_batch_as_a_whole(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, keras.layers.Lambda(lambda x: ops.concatenate([x, x[:1]]))(inputs))

    return {"predict": compiled(setting, build, loss=None).predict(features(8), verbose=0)}


class CenteredOutsideOfTraining(keras.layers.Layer):
    """The identity in training, so that its effect is not visible in steps."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs if training else inputs - ops.mean(inputs, axis=0, keepdims=True)


def _centered(layer: Any) -> Any:
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(8), layer, keras.layers.Dense(3, "softmax")])


@scenario(quick=EACH_KIND)
def predictions_that_depend_on_their_batch(setting: Setting) -> dict[str, Any]:
    """Every replica predicts whole batches."""
    found = {}
    for layer in (CenteredOutsideOfTraining(), keras.layers.Softmax(axis=0, name="along_the_samples")):
        model = compiled(setting, lambda layer=layer: _centered(layer))
        x = features()
        found[layer.name] = [model.predict(x, batch_size=BATCH, verbose=0), model.predict_on_batch(x)]
    return found


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "outside of training its outputs")))
def evaluation_of_outputs_that_depend_on_their_batch(setting: Setting) -> dict[str, Any]:
    return {"loss": compiled(setting, lambda: _centered(CenteredOutsideOfTraining())).evaluate(features(), labels())}


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "outside of training its outputs")))
def validation_of_outputs_that_depend_on_their_batch(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, lambda: _centered(CenteredOutsideOfTraining()))
    return fitted(model, validation_data=(features(), labels()))


class OwnPredictStep(keras.Sequential):
    def predict_step(self, *arguments: Any) -> Any:
        # JAX passes its state and expects it back.
        outputs = super().predict_step(*arguments)
        if keras.backend.backend() == "jax":
            outputs, state = outputs
            return outputs / ops.sum(outputs, axis=0), state
        return outputs / ops.sum(outputs, axis=0)


@scenario(quick=ONE_BACKEND)
def own_predict_step_that_relates_samples(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, lambda: OwnPredictStep([keras.Input((FEATURES,)), keras.layers.Dense(3, "sigmoid")]))
    return {"predicted": model.predict(features(), batch_size=BATCH, verbose=0)}
