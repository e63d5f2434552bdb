"""Every way to create a model, with matching data."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

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
    weights,
)
from tests.training.scenarios.registry import ONE_BACKEND, Setting, scenario


@scenario(quick=ONE_BACKEND)
def sequential_adam(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=keras.optimizers.Adam(0.02), metrics=["accuracy"])
    return fitted(model) | observed(model)


@scenario(quick=ONE_BACKEND, quick_of_three=True)
def functional_sgd_momentum_sample_weight(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        hidden = layers.Dense(8, activation="relu")(inputs)
        merged = layers.Concatenate()([hidden, inputs])
        return keras.Model(inputs, layers.Dense(1)(merged))

    model = compiled(
        setting,
        build,
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss="mse",
        metrics=["mae"],
        weighted_metrics=["mae"],
    )
    return fitted(model, y=numbers(), sample_weight=weights()) | observed(model, y=numbers(), sample_weight=weights())


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(8, activation="tanh")
        self.out = layers.Dense(CLASSES, activation="softmax")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.hidden(inputs))


@scenario(quick=ONE_BACKEND)
def subclassed_adam_class_weight(setting: Setting) -> dict[str, Any]:
    model = compiled(
        setting,
        Subclassed,
        optimizer=keras.optimizers.Adam(0.02),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    return fitted(model, class_weight={0: 0.2, 1: 1.0, 2: 3.0}) | observed(model)


@scenario()
def more_samples_than_one_batch_of_one(setting: Setting) -> dict[str, Any]:
    """Batches of one sample: most replicas never have anything to do."""
    model = compiled(setting, metrics=["accuracy"])
    x, y = features(5), labels(5)
    return fitted(model, x, y, batch_size=1) | observed(model, x, y)


@scenario(quick=ONE_BACKEND)
def several_inputs_and_outputs(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        left, right = keras.Input((FEATURES,), name="left"), keras.Input((2,), name="right")
        hidden = layers.Dense(8, activation="tanh")(layers.Concatenate()([left, right]))
        kind = layers.Dense(CLASSES, activation="softmax", name="kind")(hidden)
        size = layers.Dense(1, name="size")(hidden)
        return keras.Model([left, right], {"kind": kind, "size": size})

    model = compiled(
        setting,
        build,
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    x = {"left": features(), "right": numbers(width=2)}
    y = {"kind": labels(), "size": numbers()}
    weight = {"kind": weights(), "size": weights()[::-1].copy()}
    return fitted(model, x, y, sample_weight=weight) | observed(model, x, y)


@scenario()
def nested_inputs(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = {"a": keras.Input((FEATURES,)), "rest": [keras.Input((2,)), keras.Input((1,))]}
        hidden = layers.Concatenate()([inputs["a"], *inputs["rest"]])
        first = layers.Dense(1)(hidden)
        return keras.Model(inputs, [first, layers.Dense(2)(hidden)])

    model = compiled(setting, build, loss=["mse", "mae"])
    x = {"a": features(), "rest": [numbers(width=2), numbers()]}
    y = [numbers(seed=1), numbers(width=2, seed=2)]
    return fitted(model, x, y) | observed(model, x, y)


@scenario()
def model_inside_a_model(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(classifier()(inputs)))

    return fitted(compiled(setting, build))


@scenario()
def layer_used_twice_and_embedding(setting: Setting) -> dict[str, Any]:
    """Gradients of the embedding are sparse on TensorFlow; those of the shared layer are sums."""

    def build() -> Any:
        inputs = keras.Input((4,), dtype="int32")
        shared = layers.Dense(5, activation="tanh")
        hidden = layers.GlobalAveragePooling1D()(shared(shared(layers.Embedding(11, 5)(inputs))))
        return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(hidden))

    model = compiled(setting, build)
    tokens = np.random.default_rng(5).integers(0, 11, (33, 4)).astype("int32")
    return fitted(model, tokens) | observed(model, tokens)


def _of_words(setting: Setting, **arguments: Any) -> dict[str, Any]:
    """Words that occur several times in a batch, and embeddings of two inputs in one table."""

    def build() -> Any:
        first, second = (keras.Input((4,), dtype="int32", name=name) for name in ("first", "second"))
        table, other = layers.Embedding(5, 3), layers.Embedding(7, 2)
        pooled = [layers.GlobalAveragePooling1D()(rows) for rows in (table(first), table(second), other(first))]
        return keras.Model([first, second], layers.Dense(CLASSES, activation="softmax")(layers.Concatenate()(pooled)))

    words = [np.random.default_rng(seed).integers(0, 5, (33, 4)).astype("int32") for seed in (5, 6)]
    return fitted(compiled(setting, build, **arguments), words, epochs=3)


@scenario()
def embeddings_with_adam(setting: Setting) -> dict[str, Any]:
    """On TensorFlow, Keras squares the gradient of each occurrence by itself."""
    return _of_words(setting, optimizer=keras.optimizers.Adam(0.05))


@scenario()
def embeddings_run_eagerly_with_clipped_gradients(setting: Setting) -> dict[str, Any]:
    return _of_words(setting, optimizer=keras.optimizers.RMSprop(0.02, clipnorm=0.05), run_eagerly=True)


@scenario()
def convolution(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Conv2D(3, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(CLASSES, activation="softmax"),
            ]
        )

    images = np.random.default_rng(6).normal(size=(33, 6, 6, 1)).astype("float32")
    return fitted(compiled(setting, build), images)


@scenario()
def unused_weights_have_no_gradient(setting: Setting) -> dict[str, Any]:
    class Partly(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = layers.Dense(1), layers.Dense(1)

        def build(self, shape: Any) -> None:
            self.used.build(shape)
            self.unused.build(shape)

        def call(self, inputs: Any) -> Any:
            return self.used(inputs)

    return fitted(compiled(setting, Partly, loss="mse"), y=numbers())


@scenario()
def custom_loss_function_and_metric_function(setting: Setting) -> dict[str, Any]:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.log(ops.cosh(y_pred - y_true)), axis=-1)

    def largest_error(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y_true - y_pred), axis=-1)

    return fitted(compiled(setting, regressor, loss=loss, metrics=[largest_error]), y=numbers())


@scenario()
def built_outside_the_scope_and_compiled_inside(setting: Setting) -> dict[str, Any]:
    """`tf.distribute` asks for both inside; here compiling decides."""
    model = classifier()
    with setting.scope():
        model.compile("sgd", "sparse_categorical_crossentropy")
    return fitted(model)


@scenario()
def built_inside_the_scope_and_compiled_outside(setting: Setting) -> dict[str, Any]:
    with setting.scope():
        model = classifier()
    model.compile("sgd", "sparse_categorical_crossentropy")
    return fitted(model)


@scenario()
def trained_twice_then_saved_and_loaded(setting: Setting) -> dict[str, Any]:
    """The optimizer's state goes on from one `fit` to the next, and through a file."""
    model = compiled(setting, optimizer=keras.optimizers.Adam(0.02))
    fitted(model)
    fitted(model)
    path = setting.folder / "model.keras"
    model.save(path)
    with setting.scope():
        loaded = keras.saving.load_model(path)
    return fitted(loaded)
