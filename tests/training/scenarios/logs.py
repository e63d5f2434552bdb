"""What a step logs: results of metrics by any name, and what follows from them."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.training.scenarios.common import BATCH, FEATURES, SAMPLES, compiled, features, fitted, numbers
from tests.training.scenarios.registry import Setting, scenario
from tests.training.scenarios.steps import STEPS


def _targets() -> Any:
    return (numbers() > 0).astype("float32")


def _trained(model: Any) -> dict[str, Any]:
    x, y = features(), _targets()
    found = fitted(model, x, y, validation_data=(x, y), epochs=3)
    return found | {"evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)}


def _binary(kind: type) -> Any:
    inputs = keras.Input((FEATURES,))
    return kind(inputs, layers.Dense(1, activation="sigmoid")(inputs))


class Derived(keras.Model):
    """`compute_metrics` as the Keras guide has it: what it adds is computed from results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0 if keras.backend.backend() == "jax" else self.add_weight(shape=(), trainable=False)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        precision, recall = results["precision"], results["recall"]
        results["f1"] = 2 * precision * recall / (precision + recall + 1e-7)
        results["perplexity"] = ops.exp(results["loss"])
        if keras.backend.backend() != "jax":  # where a step is a function
            self.calls.assign(self.calls + 1)
        return results


@scenario()
def logs_computed_from_results(setting: Setting) -> dict[str, Any]:
    return _trained(
        compiled(setting, lambda: _binary(Derived), loss="binary_crossentropy", metrics=["precision", "recall"])
    )


@scenario()
def logs_computed_from_results_in_an_own_step(setting: Setting) -> dict[str, Any]:
    """An own step that returns what `compute_metrics` says, beside a result by another name."""

    class Renamed(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.total = keras.metrics.MeanSquaredError(name="total")

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            self.total.update_state(y, y_pred, sample_weight)
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            return {"error": results["total"], "root": ops.sqrt(self.total.result()), "loss": results["loss"]}

    return _trained(compiled(setting, lambda: _binary(Renamed), loss="mse"))


def _autoencoder(base: type) -> type:
    """As in the Keras example of a variational autoencoder: trackers whose results are logged by other names."""

    class Autoencoder(base):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.total_loss_tracker = keras.metrics.Mean(name="total_loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.total_loss_tracker]

        def _step(self, data: Any) -> dict[str, Any]:
            x = data[0]
            loss = ops.mean(ops.square(x - self(x, training=True)))
            self.total_loss_tracker.update_state(loss, sample_weight=ops.shape(x)[0])
            return {"loss": self.total_loss_tracker.result(), "twice": 2.0 * loss}

    return Autoencoder


@scenario(backends=("tensorflow", "torch"), quick=("torch",))
def several_results_of_a_metric_beside_a_number(setting: Setting) -> dict[str, Any]:
    """The metric counts through the epoch, the number is that of the last step."""

    class Errors(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="errors")
            self.total = self.add_weight(name="total", initializer="zeros")
            self.size = self.add_weight(name="size", initializer="zeros")

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            errors = ops.abs(ops.cast(y, "float32") - y_pred)
            self.total.assign(self.total + ops.sum(errors))
            self.size.assign(self.size + ops.cast(ops.shape(errors)[0], "float32"))

        def result(self) -> dict[str, Any]:
            return {"error": ops.divide_no_nan(self.total, self.size), "size": 1.0 * self.size}

    class Numbered(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {**super().train_step(data), "seven": ops.convert_to_tensor(7.0)}

    inputs = keras.Input((FEATURES,))
    model = compiled(setting, lambda: Numbered(inputs, layers.Dense(1)(inputs)), loss="mse", metrics=[Errors()])
    return fitted(model, y=numbers())


@scenario(backends=("tensorflow", "torch"))
def results_logged_by_other_names(setting: Setting) -> dict[str, Any]:
    class Trained(_autoencoder(keras.Model)):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x = data[0]
            if setting.backend == "torch":
                import torch

                self.zero_grad()
                loss = ops.mean(ops.square(x - self(x, training=True)))
                loss.backward()
                with torch.no_grad():
                    self.optimizer.apply([w.value.grad for w in self.trainable_weights], self.trainable_weights)
                    self.total_loss_tracker.update_state(loss, sample_weight=x.shape[0])
            else:
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = ops.mean(ops.square(x - self(x, training=True)))
                self.optimizer.apply_gradients(
                    zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
                )
                self.total_loss_tracker.update_state(loss, sample_weight=ops.shape(x)[0])
            return {"loss": self.total_loss_tracker.result()}

        def test_step(self, data: Any) -> Any:
            logs = self._step(data)
            return {"loss": logs["loss"]}

    inputs = keras.Input((FEATURES,))
    model = compiled(setting, lambda: Trained(inputs, layers.Dense(FEATURES)(inputs)), loss=None)
    x = features()
    found = model.fit(x, x, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, validation_data=(x, x))
    return {"history": found.history, "evaluate": model.evaluate(x, x, batch_size=7, verbose=0, return_dict=True)}


@scenario(backends=("jax",))
def results_logged_by_other_names_on_jax(setting: Setting) -> dict[str, Any]:
    class Renaming(STEPS["jax"]):  # type: ignore[misc,valid-type]
        def train_step(self, state: Any, data: Any) -> Any:
            logs, state = super().train_step(state, data)
            return {"a mean": logs["loss"], "others": logs["compile_metrics"]}, state

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return Renaming(inputs, layers.Dense(3, activation="softmax")(inputs))

    assert SAMPLES % BATCH, "the last batch is smaller"
    return fitted(compiled(setting, build, metrics=["accuracy"]))
