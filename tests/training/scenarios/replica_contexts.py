"""Layers, losses and steps that ask for the other replicas, as those of programs for `tf.distribute` do."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import phalanx
from phalanx.callbacks import OnChief
from phalanx.errors import UnsupportedError
from tests.training.scenarios.common import (
    CLASSES,
    FEATURES,
    classifier,
    compiled,
    features,
    fitted,
    labels,
    numbers,
    observed,
    regressor,
)
from tests.training.scenarios.registry import BACKENDS, ONE_BACKEND, Setting, scenario


class Centered(layers.Layer):
    """Subtracts the mean of the global batch while it trains, and remembers the newest."""

    how: str = "sums"

    def build(self, shape: Any) -> None:
        self.newest = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs - self.newest
        context = phalanx.get_replica_context()
        if self.how == "means":
            mean = context.all_reduce("MEAN", ops.mean(inputs, axis=0))
        elif self.how == "rows":
            mean = ops.mean(context.all_gather(inputs, axis=0), axis=0)
        else:
            count = ops.cast(ops.shape(inputs)[0], "float32")
            sums = context.all_reduce("SUM", {"inputs": ops.sum(inputs, axis=0), "count": count})
            mean = sums["inputs"] / sums["count"]
        self.newest.assign(ops.stop_gradient(mean))
        return inputs - mean


def centering(how: str) -> Any:
    centered = Centered()
    centered.how = how
    hidden = layers.Dense(8, activation="tanh")
    return keras.Sequential([keras.Input((FEATURES,)), hidden, centered, layers.Dense(CLASSES, activation="softmax")])


@scenario(quick=BACKENDS, quick_of_three=True)
def layers_that_gather_rows_of_all_replicas(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, lambda: centering("rows"))
    return fitted(model) | observed(model)


@scenario(quick=ONE_BACKEND)
def layers_that_merge_values_of_all_replicas(setting: Setting) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for how in "sums", "means", "rows":
        model = compiled(setting, lambda how=how: centering(how))
        found[how] = fitted(model) | observed(model)
        with setting.scope():  # as many programs call it
            found[f"{how}, inside"] = fitted(compiled(setting, lambda how=how: centering(how)))
    return found


@scenario(quick=ONE_BACKEND)
def added_losses_of_merged_values(setting: Setting) -> dict[str, Any]:
    """As those that balance experts: of what all samples have in common."""

    class Balanced(layers.Layer):
        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                common = phalanx.get_replica_context().all_reduce("MEAN", ops.mean(inputs, axis=0))
                self.add_loss(0.1 * ops.sum(ops.square(common)))
            return inputs

    def build() -> Any:
        hidden = layers.Dense(8, activation="tanh")
        return keras.Sequential([keras.Input((FEATURES,)), hidden, Balanced(), layers.Dense(CLASSES, "softmax")])

    return fitted(compiled(setting, build))


@scenario(
    error=dict.fromkeys(BACKENDS, ("UnsupportedError", "number of replicas")),
    plain=False,
    quick=ONE_BACKEND,
    quick_of_three=True,
)
def added_losses_divided_by_the_number_of_replicas(setting: Setting) -> dict[str, Any]:
    """As programs for `tf.distribute` scale regularization, whose gradients are summed."""

    class Regularized(layers.Dense):
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.1 * ops.sum(ops.square(self.kernel)) / setting.strategy.num_replicas_in_sync)
            return super().call(inputs)

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), Regularized(CLASSES, activation="softmax")])

    return fitted(compiled(setting, build))


@scenario(quick=ONE_BACKEND)
def contrastive_losses_that_gather_rows(setting: Setting) -> dict[str, Any]:
    """Each sample is to be nearer to its own target than to those of all other samples."""

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = layers.Dense(4), layers.Dense(4)

        def call(self, inputs: Any) -> Any:
            return ops.stack([self.left(inputs), self.right(inputs)], axis=1)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            context = phalanx.get_replica_context()
            own = ops.shape(y_pred)[0]
            everyone = context.all_gather(y_pred[:, 1], axis=0)
            near = ops.sum(y_pred[:, 0] * y_pred[:, 1], axis=-1)
            return ops.sum(ops.logsumexp(y_pred[:, 0] @ ops.transpose(everyone), axis=-1) - near) / ops.cast(
                own, "float32"
            )

    return fitted(compiled(setting, Model, loss=None), features(32), numbers(32))


@scenario(plain=False, quick=ONE_BACKEND)
def places_in_fit(setting: Setting) -> dict[str, Any]:
    """What is said of the strategy where layers are built and called, and in callbacks."""
    said: dict[str, set[Any]] = {"build": set(), "call": set(), "callback": set()}

    def look(place: str) -> None:
        context = phalanx.get_replica_context()
        numbers = context.num_replicas_in_sync, context.replica_id_in_sync_group
        is_this = phalanx.get_strategy() is setting.strategy is context.strategy
        said[place].add((phalanx.has_strategy(), phalanx.in_cross_replica_context(), is_this, *numbers))

    class Looking(layers.Layer):
        def build(self, shape: Any) -> None:
            look("build")

        def call(self, inputs: Any) -> Any:
            look("call")
            return inputs

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.looking, self.dense = Looking(), layers.Dense(CLASSES, activation="softmax")

        def call(self, inputs: Any) -> Any:
            return self.dense(self.looking(inputs))

    model = compiled(setting, Model)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: look("callback"))
    fitted(model, callbacks=[callback])
    assert said["build"] == said["callback"] == {(True, False, True, 1, 0)}
    # A trial of the model's own code takes its steps with one process's batch, and with the parts of two.
    assert (True, False, True, setting.world_size, setting.rank) in said["call"]
    assert {each[:3] for each in said["call"]} == {(True, False, True)}
    assert not phalanx.has_strategy()
    made = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: made_models.append(regressor()))
    made_models: list[Any] = []
    with setting.scope():
        fitted(compiled(setting), callbacks=[made])
    return {"made": len(made_models)}


class Divided(keras.Sequential):
    """Its loss is divided by the number of replicas, as custom loops do whose gradients are summed."""

    strategy: Any = None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred)
        return ops.mean(losses) / self.strategy.num_replicas_in_sync


@scenario(error=dict.fromkeys(BACKENDS, ("UnsupportedError", "number of replicas")), plain=False, quick=ONE_BACKEND)
def losses_divided_by_the_number_of_replicas(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        model = Divided(classifier().layers)
        model.strategy = setting.strategy
        return model

    return fitted(compiled(setting, build))


@scenario(error=dict.fromkeys(BACKENDS, ("UnsupportedError", "in predict()")), plain=False, quick=ONE_BACKEND)
def values_merged_in_predictions(setting: Setting) -> dict[str, Any]:
    class Shared(layers.Layer):
        def call(self, inputs: Any) -> Any:
            total = phalanx.get_replica_context().all_reduce("SUM", ops.sum(inputs))
            return inputs - 0.0 * total

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), Shared(), layers.Dense(CLASSES)])

    return {"predict": compiled(setting, build).predict(features(), verbose=0)}


@scenario(error=dict.fromkeys(BACKENDS, ("UnsupportedError", "sums and means")), plain=False, quick=ONE_BACKEND)
def greatest_values_of_all_replicas(setting: Setting) -> dict[str, Any]:
    class Greatest(layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs / phalanx.get_replica_context().all_reduce("MAX", ops.max(inputs))

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), Greatest(), layers.Dense(CLASSES)])

    return fitted(compiled(setting, build), np.abs(features()), labels())


class CountedInRun(keras.callbacks.Callback):
    """At the end of each epoch, sums all rows by `strategy.run`, of which each replica counts its own."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting, self.sums = setting, []
        with setting.scope():
            self._metric = keras.metrics.Sum()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        setting, metric, rows = self._setting, self._metric, features(9, seed=epoch)
        metric.reset_state()
        if setting.alone:
            metric.update_state(rows)
        else:
            setting.strategy.run(metric.update_state, args=(rows[setting.rank :: setting.world_size],))
        self.sums.append(float(metric.result()))


@scenario(quick=ONE_BACKEND)
def a_metric_counted_in_a_callback(setting: Setting) -> dict[str, Any]:
    counted = CountedInRun(setting)
    found = fitted(compiled(setting, metrics=["accuracy"]), callbacks=[counted], epochs=3)
    return found | {"sums": counted.sums}


class ReadOnChief(keras.callbacks.Callback):
    def __init__(self, metric: Any) -> None:
        super().__init__()
        self._metric, self.problem = metric, ""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        try:
            self._metric.result()
        except UnsupportedError as error:
            self.problem = str(error)


@scenario(quick=ONE_BACKEND)
def a_metric_read_by_the_chief_alone(setting: Setting) -> dict[str, Any]:
    counted = CountedInRun(setting)
    read = ReadOnChief(counted._metric)
    found = fitted(compiled(setting), callbacks=[counted, OnChief(read)])
    if setting.world_size > 1 and setting.rank == 0:
        assert "what strategy.run has counted" in read.problem
    return found | {"sums": counted.sums}
