"""The arguments of `fit`, `evaluate` and `predict`."""

from __future__ import annotations

from typing import Any

import keras

from tests.training.scenarios.common import (
    BATCH,
    FEATURES,
    compiled,
    features,
    fitted,
    labels,
    numbers,
    regressor,
    weights,
)
from tests.training.scenarios.registry import ONE_BACKEND, Setting, scenario


@scenario()
def validation_data(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, metrics=["accuracy"])
    validation = (features(11, seed=1), labels(11, seed=1), weights(11))
    return fitted(model, validation_data=validation, validation_batch_size=5)


@scenario(quick=ONE_BACKEND)
def validation_split(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, metrics=["accuracy"])
    return fitted(model, validation_split=0.3, epochs=4, validation_freq=[2, 3], sample_weight=weights())


@scenario()
def validation_steps(setting: Setting) -> dict[str, Any]:
    validation = (features(20, seed=1), labels(20, seed=1))
    return fitted(compiled(setting), validation_data=validation, validation_steps=2, validation_batch_size=4)


@scenario()
def initial_epoch(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    history = model.fit(features(), labels(), batch_size=16, epochs=4, initial_epoch=2, shuffle=False, verbose=0)
    return {"epochs": history.epoch, "history": history.history, "weights": model.get_weights()}


@scenario()
def order_after_a_fit_without_an_epoch(setting: Setting) -> dict[str, Any]:
    """Such a `fit` builds the metrics with a batch, for which Keras draws an order on JAX and PyTorch."""
    model = compiled(setting, metrics=["accuracy"])
    nothing = model.fit(features(), labels(), batch_size=16, initial_epoch=1, epochs=1, verbose=0)
    return {"epochs": nothing.epoch, "fit": fitted(model, shuffle=True)}


@scenario(quick=ONE_BACKEND)
def means_of_losses_after_a_fit_without_an_epoch(setting: Setting) -> dict[str, Any]:
    """Probing losses before the first step leaves no trace in their means, which Keras keeps."""

    def distance(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)

    def two_outputs() -> Any:
        x = keras.Input((FEATURES,))
        return keras.Model(x, [keras.layers.Dense(1, name="a")(x), keras.layers.Dense(1, name="b")(x)])

    model = compiled(setting, two_outputs, loss=[distance, "mse"])
    model.fit(features(), [numbers(), numbers(seed=1)], batch_size=BATCH, initial_epoch=1, epochs=1, verbose=0)
    # Keras on TensorFlow has not built those of single losses yet, so names are not comparable.
    return {"means": [mean for mean in model.get_metrics_result().values() if mean != 0]}


@scenario()
def steps_per_epoch_of_arrays(setting: Setting) -> dict[str, Any]:
    """Two of three batches per epoch: the second epoch continues where the first stopped."""
    return fitted(compiled(setting), steps_per_epoch=2, epochs=3)


@scenario()
def steps_per_epoch_of_shuffled_arrays(setting: Setting) -> dict[str, Any]:
    """Epochs end within passes over the data, and the last epoch ends within a pass."""
    model = compiled(setting)
    first = fitted(model, steps_per_epoch=2, epochs=4, shuffle=True)
    return {"first": first, "second": fitted(model, shuffle=True)}


@scenario()
def a_fit_after_one_that_was_stopped_within_a_pass(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)

    def stop(batch: int, logs: Any) -> None:
        model.stop_training = batch == 1

    first = fitted(model, shuffle=True, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)])
    return {"first": first, "second": fitted(model, shuffle=True)}


@scenario()
def evaluate_and_predict_steps(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    return {
        "evaluate": model.evaluate(features(), labels(), batch_size=8, steps=2, verbose=0, return_dict=True),
        "list": model.evaluate(features(), labels(), batch_size=8, verbose=0),
        "predict": model.predict(features(), batch_size=8, steps=2, verbose=0),
    }


@scenario(quick=ONE_BACKEND)
def shuffled_arrays(setting: Setting) -> dict[str, Any]:
    """Each Keras backend shuffles in its own way. The order is that of the backend."""
    return fitted(compiled(setting, metrics=["accuracy"]), shuffle=True, epochs=3)


@scenario()
def shuffled_within_batches(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting), shuffle="batch")


@scenario()
def batch_size_by_default(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    history = model.fit(features(), labels(), epochs=2, shuffle=False, verbose=0)
    return {"history": history.history, "predict": model.predict(features(), verbose=0)}


@scenario()
def several_models_in_turn(setting: Setting) -> dict[str, Any]:
    first, second = compiled(setting), compiled(setting, regressor, loss="mse")
    found = []
    for _ in range(2):
        found.append(fitted(first))
        found.append(fitted(second, y=features()[:, :1]))
    return {"found": found}


@scenario()
def learning_rate_set_between_fits(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    fitted(model)
    model.optimizer.learning_rate = 0.01
    found = fitted(model)
    return found | {"rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))}


@scenario()
def weights_set_between_fits(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    fitted(model)
    model.set_weights([0.5 * weight for weight in model.get_weights()])
    return fitted(model)
