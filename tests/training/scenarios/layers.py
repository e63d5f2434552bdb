"""Layers with their own state, randomness or losses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import phalanx
from tests.support.seeds import set_random_seed
from tests.training.scenarios.common import (
    BATCH,
    CLASSES,
    FEATURES,
    classifier,
    compiled,
    features,
    fitted,
    labels,
    observed,
)
from tests.training.scenarios.metrics import Largest
from tests.training.scenarios.registry import BACKENDS, ONE_BACKEND, Setting, scenario


@scenario()
def add_loss_and_weight_regularizers(setting: Setting) -> dict[str, Any]:
    class Sparse(layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.1 * ops.mean(ops.abs(inputs)))
            return inputs

    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(8, activation="tanh", kernel_regularizer="l2", bias_regularizer="l1"),
                Sparse(),
                layers.Dense(CLASSES, activation="softmax", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02)),
            ]
        )

    model = compiled(setting, build)
    return fitted(model) | observed(model)


@scenario()
def activity_regularizer(setting: Setting) -> dict[str, Any]:
    """Keras sums it over the batch."""
    model = compiled(setting, lambda: classifier(activity_regularizer="l2"))
    return fitted(model) | observed(model)


@scenario(plain=False, quick=ONE_BACKEND)
def batch_normalisation_trains_and_ranks_agree(setting: Setting) -> dict[str, Any]:
    """Each replica normalizes its own part of the batch, as in `tf.distribute`, so the numbers differ from those of one
    process. But the weights and moving statistics of the ranks are equal, and the model learns."""

    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(8),
                layers.BatchNormalization(momentum=0.5),
                layers.Activation("relu"),
                layers.Dense(CLASSES, activation="softmax"),
            ]
        )

    model = compiled(setting, build)
    x = features(48)
    y = np.argmax(x[:, :CLASSES], axis=1)
    found = fitted(model, x, y, epochs=8) | observed(model, x, y)
    losses = found["history"]["loss"]
    assert losses[-1] < 0.7 * losses[0], losses
    assert found["evaluate"]["loss"] < 0.9 * losses[0], found["evaluate"]
    return found


@scenario()
def batch_normalisation_averages_its_statistics(setting: Setting) -> dict[str, Any]:
    """With equal parts, the moving mean over the ranks is that of the global batch."""

    def build() -> Any:
        return keras.Sequential(
            [keras.Input((FEATURES,)), layers.BatchNormalization(momentum=0.5, center=False, scale=False)]
        )

    model = compiled(setting, build, loss="mse", optimizer="sgd")
    x = features(12)
    model.fit(x, x, batch_size=6, shuffle=False, verbose=0)
    return {
        "mean": model.layers[0].moving_mean.numpy()
        if setting.backend == "tensorflow"
        else np.asarray(keras.ops.convert_to_numpy(model.layers[0].moving_mean))
    }


@scenario()
def batch_normalisation_in_inference_mode(setting: Setting) -> dict[str, Any]:
    """Frozen statistics: exact again."""

    def build() -> Any:
        normalisation = layers.BatchNormalization()
        normalisation.trainable = False
        return keras.Sequential(
            [keras.Input((FEATURES,)), layers.Dense(8), normalisation, layers.Dense(CLASSES, activation="softmax")]
        )

    return fitted(compiled(setting, build))


@scenario(plain=False, quick=BACKENDS)
def dropout_differs_between_ranks_on_the_same_start(setting: Setting) -> dict[str, Any]:
    """A batch of equal samples passes only through dropout, so each rank sees its masks."""

    def build() -> Any:
        return keras.Sequential([keras.Input((64,)), layers.Dense(4), layers.Dropout(0.5, seed=3)])

    model = compiled(setting, build, loss="mse")
    start = model.get_weights()
    x = np.ones((BATCH, 64), "float32")
    found = fitted(model, x, np.zeros((BATCH, 4), "float32"))
    own = np.asarray(ops.convert_to_numpy(model.layers[1](np.ones((4, 64), "float32"), training=True)))
    masks = [np.frombuffer(mask, bool) for mask in setting.gather((own == 0).tobytes())]
    for rank, mask in enumerate(masks):
        assert 0.3 < mask.mean() < 0.7
        assert all((mask != other).any() for other in masks[:rank]), "two ranks drop the same"
    return {"start": start, **found}


@scenario(plain=False, quick=ONE_BACKEND)
def dropout_without_a_seed_differs_between_ranks(setting: Setting) -> dict[str, Any]:
    """On PyTorch, Keras draws the seed from the generator of the whole process."""

    class Always(layers.Dropout):  # type: ignore[misc]
        def call(self, inputs: Any, training: bool = False) -> Any:
            return super().call(inputs, training=True)

    set_random_seed(1)
    model = compiled(setting, lambda: keras.Sequential([keras.Input((64,)), Always(0.5)]), loss="mse")
    x = np.ones((4 * setting.world_size, 64), "float32")
    for predict in (model.predict_on_batch, lambda x: model.predict(x, verbose=0)):
        of_ranks = np.split(predict(x) == 0, setting.world_size)
        assert len({mask.tobytes() for mask in of_ranks}) == setting.world_size, "two ranks drop the same"
    return {}


@scenario(backends=("tensorflow",), quick=BACKENDS)
def strings(setting: Setting) -> dict[str, Any]:
    words = ops.convert_to_tensor([["ape"], ["bee"], ["cat"]] * 11, "string")

    def build() -> Any:
        inputs = keras.Input((1,), dtype="string")
        rows = layers.Embedding(4, 3)(layers.StringLookup(vocabulary=["ape", "bee", "cat"])(inputs))
        return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(layers.Flatten()(rows)))

    model = compiled(setting, build)
    y = np.array([0, 1, 2] * 11, "int32")
    found = fitted(model, words, y)
    return {**found, "evaluated": model.evaluate(words, y, batch_size=8, verbose=0)}


@scenario()
def embeddings_of_positions(setting: Setting) -> dict[str, Any]:
    """Rows that each batch looks up once, whatever it contains, in addition to rows of each sample. An optimizer that
    divides by squared gradients distinguishes a sum from its parts."""

    class Positions(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = layers.Embedding(FEATURES, 3)

        def call(self, inputs: Any) -> Any:
            return inputs + self.table(ops.arange(0, FEATURES))

    def build() -> Any:
        inputs = keras.Input((FEATURES,), dtype="int32")
        hidden = layers.Embedding(5, 3)(inputs) + layers.Embedding(2, 3)(ops.zeros_like(inputs))
        return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(layers.Flatten()(Positions()(hidden))))

    model = compiled(setting, build, optimizer=keras.optimizers.Adam(0.01))
    return fitted(model, (np.abs(features()) * 2 % 5).astype("int32"))


@scenario(quick=("tensorflow",))
def embeddings_of_positions_in_samples_of_any_length(setting: Setting) -> dict[str, Any]:
    """Where the length of the samples is unknown when the step is traced; beside zeros, of which each sample has its
    own."""

    class Positions(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.zero = layers.Embedding(FEATURES, 3), layers.Embedding(2, 3)

        def call(self, inputs: Any) -> Any:
            zeros = self.zero(ops.zeros_like(inputs, dtype="int64"))
            return zeros + self.table(ops.arange(ops.shape(inputs)[-1]))

    def build() -> Any:
        inputs = keras.Input((None,), dtype="int32")
        hidden = layers.GlobalAveragePooling1D()(layers.Embedding(5, 3)(inputs) + Positions()(inputs))
        return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(hidden))

    model = compiled(setting, build, optimizer=keras.optimizers.Adam(0.01))
    return fitted(model, (np.abs(features()) * 2 % 5).astype("int32"))


@scenario(backends=("tensorflow",))
def embeddings_with_accumulated_gradients(setting: Setting) -> dict[str, Any]:
    """Keras sums the rows of an accumulated gradient, but not if nothing is accumulated."""

    def build() -> Any:
        inputs = keras.Input((FEATURES,), dtype="int32")
        hidden = layers.Flatten()(layers.Embedding(5, 3)(inputs))
        return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(hidden))

    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    return fitted(compiled(setting, build, optimizer=optimizer), (np.abs(features()) * 2 % 5).astype("int32"))


@scenario()
def spectral_normalization_with_accumulated_gradients_and_single_samples(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        hidden = layers.SpectralNormalization(layers.Dense(5))
        return keras.Sequential([keras.Input((FEATURES,)), hidden, layers.Dense(CLASSES, activation="softmax")])

    model = compiled(setting, build, optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    model.fit(features(6), labels(6), batch_size=1, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights()}


@scenario(plain=False)
def noise_of_keras_random_differs_between_ranks(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        return keras.Sequential(
            [keras.Input((FEATURES,)), layers.GaussianNoise(0.5), layers.Dense(CLASSES, activation="softmax")]
        )

    model = compiled(setting, build)
    found = fitted(model, epochs=4)
    assert found["history"]["loss"][-1] < found["history"]["loss"][0]
    return found


@scenario()
def frozen_layers_then_recompiled(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=keras.optimizers.Adam(0.05))
    model.layers[0].trainable = False
    with setting.scope():
        model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
    frozen = model.layers[0].get_weights()
    first = fitted(model)
    np.testing.assert_array_equal(frozen[0], model.layers[0].get_weights()[0])
    model.layers[0].trainable = True
    with setting.scope():
        model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
    second = fitted(model)
    assert (frozen[0] != model.layers[0].get_weights()[0]).any()
    return {"first": first, "second": second, "labels": labels()}


@scenario()
def recurrent_layers_without_masks(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input((5, 2)),
                layers.GRU(4, return_sequences=True),
                layers.LSTM(3),
                layers.Dense(CLASSES, activation="softmax"),
            ]
        )

    x = np.random.default_rng(8).normal(size=(33, 5, 2)).astype("float32")
    return fitted(compiled(setting, build), x)


@scenario()
def state_of_a_layer_of_ones_own(setting: Setting) -> dict[str, Any]:
    """A layer keeps a moving average of the samples' mean, so the mean over the ranks is the global one."""

    class Follow(layers.Layer):
        def build(self, shape: Any) -> None:
            self.centre = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="centre")

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.centre.assign(0.5 * self.centre + 0.5 * ops.mean(inputs, axis=0))
            return inputs

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), Follow(), layers.Dense(CLASSES, activation="softmax")])

    return fitted(compiled(setting, build))


@scenario(plain=False, quick=ONE_BACKEND)
def predictions_of_random_layers_differ(setting: Setting) -> dict[str, Any]:
    """Sampling, as in a variational autoencoder: each batch and each pass draws new numbers."""

    class Sampling(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(3)

        def call(self, x: Any) -> Any:
            return x + keras.random.normal(ops.shape(x), seed=self.seed_generator)

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4), Sampling()])

    model = compiled(setting, build, loss="mse")
    x = np.ones((8, FEATURES), "float32")
    first, second = (model.predict(x, batch_size=4, verbose=0) for _ in range(2))
    assert (first != second).any()
    assert (first[:4] != first[4:]).any()
    return {"first": first, "second": second}


@scenario(backends=("torch",), plain=False, quick=BACKENDS)
def modules_of_pytorch_among_the_layers(setting: Setting) -> dict[str, Any]:
    """Statistics of PyTorch's own batch normalization are initially those of the chief, and then merged."""
    import torch

    norm = torch.nn.BatchNorm1d(FEATURES)
    norm.running_mean.fill_(5.0 * setting.rank)
    norm.num_batches_tracked.fill_(setting.rank)
    norm.register_buffer("phases", torch.full((2,), 1j * setting.rank))

    def build() -> Any:
        wrapped = layers.TorchModuleWrapper(norm)
        return keras.Sequential([keras.Input((FEATURES,)), wrapped, layers.Dense(CLASSES, activation="softmax")])

    model = compiled(setting, build)
    found = fitted(model, batch_size=11)
    buffers = {name: buffer.cpu().numpy().copy() for name, buffer in norm.named_buffers()}
    buffers["phases"] = buffers["phases"].imag
    return {**found, "predict": model.predict(features(), verbose=0), "buffers": buffers}


@scenario()
def added_losses_that_are_vectors(setting: Setting) -> dict[str, Any]:
    """Keras sums them: a value per sample, such as a CTC loss in a layer, and a penalty per unit."""

    class Penalised(layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.scale = self.add_weight(shape=(11,), initializer="ones")

        def call(self, inputs: Any) -> Any:
            self.add_loss(0.01 * ops.mean(inputs**2, axis=-1, keepdims=True))
            self.add_loss(0.001 * ops.abs(self.scale))
            return inputs * self.scale

    def build() -> Any:
        parts = [layers.Dense(11), Penalised(), layers.Dense(CLASSES, activation="softmax", kernel_regularizer="l2")]
        return keras.Sequential([keras.Input((FEATURES,)), *parts])

    model = compiled(setting, build)
    return {**fitted(model), **observed(model)}


@scenario(backends=("tensorflow",))
def strings_in_and_out(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    words = np.array(["a", "b c", "c", "b"] * 6)[:, None]
    with setting.scope():
        inputs = keras.Input((1,), dtype="string")
        numbered = layers.TextVectorization(output_sequence_length=2, vocabulary=["a", "b", "c"])
        hidden = layers.Flatten()(layers.Embedding(6, 2)(numbered(inputs)))
        model = keras.Model(inputs, layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        names = layers.StringLookup(vocabulary=["a", "b", "c"], invert=True)
        named = keras.Model(inputs, names(numbered(inputs)))
    data = tf.data.Dataset.from_tensor_slices((words, np.arange(24.0))).batch(10)
    return {
        "history": model.fit(data, epochs=1, verbose=0).history,
        "predict": model.predict(data, verbose=0),
        "named": [word.decode() for row in named.predict(data, verbose=0) for word in row],
    }


@scenario(plain=False, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "was created with aggregation='sum'")))
def layer_that_keeps_a_sum(setting: Setting) -> dict[str, Any]:
    class Count(layers.Layer):
        def build(self, shape: Any) -> None:
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.count.assign_add(ops.cast(ops.shape(x)[0], "float32"))
            return x

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), Count(), layers.Dense(CLASSES, activation="softmax")])

    return fitted(compiled(setting, build))


class Centered(layers.Layer):
    """Subtracts a moving mean of its inputs, which it also updates when the model is evaluated."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        before = ops.stop_gradient(ops.copy(self.mean))
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x - before


def _centering() -> Any:
    return keras.Sequential([keras.Input((FEATURES,)), Centered(), layers.Dense(CLASSES, activation="softmax")])


KEEPS = "changes when the model is evaluated or predicts"


@scenario(plain=False, error=dict.fromkeys(BACKENDS, ("UnsupportedError", KEEPS)))
def layer_that_learns_in_evaluation(setting: Setting) -> dict[str, Any]:
    return {"loss": compiled(setting, _centering).evaluate(features(), labels(), verbose=0)}


@scenario(plain=False, error=dict.fromkeys(BACKENDS, ("UnsupportedError", KEEPS)), quick=ONE_BACKEND)
def layer_that_learns_in_prediction(setting: Setting) -> dict[str, Any]:
    return {"outputs": compiled(setting, _centering).predict(features(), verbose=0)}


@scenario()
def layer_that_counts_its_calls(setting: Setting) -> dict[str, Any]:
    class Counted(layers.Layer):
        def build(self, shape: Any) -> None:
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            self.calls.assign_add(1.0)
            return x / (1.0 + 0.01 * ops.stop_gradient(self.calls))

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), Counted(), layers.Dense(CLASSES, activation="softmax")])

    return fitted(compiled(setting, build))


def _synchronized(**options: Any) -> Any:
    """Plain Keras supports the argument only on TensorFlow."""
    return layers.BatchNormalization(synchronized=phalanx.has_strategy(), **options)


def _normalized(*before: Any) -> Any:
    """A model whose batches are normalized over all replicas."""
    return keras.Sequential([*before, _synchronized(momentum=0.6), layers.Dense(CLASSES, activation="softmax")])


@scenario(quick=BACKENDS, quick_of_three=True)
def batch_normalization_over_all_replicas(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, lambda: _normalized(keras.Input((FEATURES,)), layers.Dense(4)))
    found = fitted(model, batch_size=11)
    on_batch = [model.train_on_batch(features()[:11], labels()[:11]) for _ in range(2)]  # a size compiled already
    return {**found, **observed(model), "on_batch": on_batch, "afterwards": model.get_weights()}


@scenario()
def batch_normalization_over_all_replicas_by_an_option(setting: Setting) -> dict[str, Any]:
    """Of a model made outside of the scope, whose layers do not say so."""
    if not setting.alone:
        strategy = phalanx.MultiWorkerMirroredStrategy(synchronized_batch_norm=True)
        setting = Setting(strategy, setting.folder, setting.shared, setting.backend)
    set_random_seed(1)
    images = [keras.Input((FEATURES,)), layers.Reshape((FEATURES, 1, 1)), layers.Conv2D(3, (2, 1))]
    inner = [layers.BatchNormalization(momentum=0.6, axis=-1), layers.Flatten(), layers.BatchNormalization(renorm=True)]
    model = keras.Sequential([*images, *inner, layers.Dense(CLASSES, activation="softmax")])
    assert not any(layer.get_config().get("synchronized") for layer in model.layers)
    model = compiled(setting, lambda: model)
    return fitted(model, batch_size=8) | observed(model)


@scenario(tolerance=5e-3)
def batch_normalization_over_all_replicas_in_mixed_precision(setting: Setting) -> dict[str, Any]:
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=256.0)
        build = lambda: _normalized(keras.Input((FEATURES,)), layers.Dense(4))  # noqa: E731
        return fitted(compiled(setting, build, optimizer=optimizer), batch_size=11)
    finally:
        keras.mixed_precision.set_dtype_policy(before)


@scenario()
def batch_normalization_over_all_replicas_without_a_graph(setting: Setting) -> dict[str, Any]:
    build = lambda: _normalized(keras.Input((FEATURES,)), layers.Dense(4))  # noqa: E731
    return fitted(compiled(setting, build, run_eagerly=True), batch_size=11)


@scenario()
def batch_normalization_of_images_over_all_replicas(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        images = [keras.Input((FEATURES,)), layers.Reshape((FEATURES, 1, 1)), layers.Conv2D(3, (2, 1))]
        inner = _synchronized()
        return _normalized(*images, inner, layers.Activation("relu"), layers.Flatten())

    return fitted(compiled(setting, build), batch_size=5)  # the last batch has none for some ranks


@scenario()
def batch_normalization_over_all_replicas_of_what_a_mask_leaves(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        sequence = [keras.Input((FEATURES,)), layers.Reshape((FEATURES // 2, 2)), _MasksSmall()]
        return _normalized(*sequence, _synchronized(), layers.Flatten())

    return fitted(compiled(setting, build), batch_size=11)


class _MasksSmall(layers.Layer):
    """Args: fills: what it puts where it masks; None: what is there."""

    supports_masking = True

    def __init__(self, fills: float | None = None) -> None:
        super().__init__()
        self.fills = fills

    def call(self, x: Any) -> Any:
        return x if self.fills is None else ops.where(x > 0.3, x, self.fills)

    def compute_mask(self, x: Any, mask: Any = None) -> Any:
        return x[..., 0] > 0.3


@scenario()
def batch_normalization_over_all_replicas_where_what_does_not_count_is_not_finite(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        sequence = [keras.Input((FEATURES,)), layers.Reshape((FEATURES // 2, 2)), _MasksSmall(fills=np.nan)]
        inner = _synchronized(scale=False)  # a scale has NaN for gradient, as in Keras
        return _normalized(*sequence, inner, _Fills(), layers.Flatten())

    return fitted(compiled(setting, build), batch_size=11)


class _Fills(layers.Layer):
    """Puts 0 where something is not finite."""

    supports_masking = True

    def call(self, x: Any) -> Any:
        return ops.where(ops.isfinite(x), x, ops.zeros_like(x))


@scenario(backends=("tensorflow",))
def batch_normalization_over_all_replicas_of_features_whose_number_is_unknown(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    class Forgets(layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.ensure_shape(tf.py_function(lambda value: value, [x], tf.float32), [None, None])

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    return fitted(compiled(setting, lambda: _normalized(keras.Input((FEATURES,)), Forgets())), batch_size=11)


@scenario(backends=("tensorflow",))
def batch_normalization_over_all_replicas_in_a_function_of_its_own(setting: Setting) -> dict[str, Any]:
    """It is traced before `fit`, and kept when the model is compiled again."""
    import tensorflow as tf

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = layers.Dense(4)
            self.normalization = _synchronized(momentum=0.6)
            self.classes = layers.Dense(CLASSES, activation="softmax")

        @tf.function
        def normalized(self, x: Any, training: bool) -> Any:
            return self.normalization(x, training=training)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.classes(self.normalized(self.first(x), training))

    model = compiled(setting, Model)
    model(features()[:5], training=True)
    first = fitted(model, batch_size=11)
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    second = fitted(model, batch_size=17)
    model(features()[: 1 + setting.rank], training=True)  # alone: no other rank takes part
    return {"first": first, "second": second}


@scenario(backends=("tensorflow",))
def batch_normalization_over_all_replicas_with_a_penalty_of_gradients(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    class Model(keras.Model):
        def build(self, shape: Any) -> None:
            self.first = layers.Dense(4, activation="tanh")
            self.normalization = _synchronized()
            self.last = layers.Dense(1)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.last(ops.tanh(self.normalization(self.first(x), training=training)))

        def train_step(self, data: Any) -> dict[str, Any]:
            x, _ = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    total = tf.reduce_sum(self(x, training=True))
                loss = tf.reduce_mean(tf.reduce_sum(inner.gradient(total, x) ** 2, axis=1))
            weights = self.trainable_variables
            gradients = [0 * w if g is None else g for g, w in zip(tape.gradient(loss, weights), weights, strict=True)]
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss}

    # As many samples on each rank: a sum of their outputs, unlike a mean, weighs each rank's by its share.
    found = fitted(compiled(setting, Model), features()[:24], labels()[:24], batch_size=12)
    return {"weights": found["weights"]}


@scenario(backends=("tensorflow",))
def batch_normalization_over_all_replicas_in_a_step_of_its_own(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    class Model(keras.Model):
        def build(self, shape: Any) -> None:
            # Built by `fit`, and so outside of the scope.
            self.normalization = layers.BatchNormalization(synchronized=not setting.alone)
            self.classes = layers.Dense(CLASSES, activation="softmax")
            self.entropy = keras.metrics.Mean(name="entropy")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.classes(self.normalization(x, training=training))

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.entropy.update_state(loss, sample_weight=tf.shape(x)[0])
            return {"entropy": self.entropy.result()}

    model = compiled(setting, Model)
    found = fitted(model, batch_size=11)
    return {"entropy": found["history"]["entropy"], "weights": found["weights"]}


@scenario(backends=("jax", "tensorflow"), quick=("jax",), worlds=(2,))
def stateful_layers(setting: Setting) -> dict[str, Any]:
    """A sample of a batch continues the sample at its place in the batch before, on the same replica. (On
    PyTorch Keras itself cannot train them.)"""

    def build() -> Any:
        inputs = keras.Input(batch_shape=(8 // setting.world_size, 4, 2))
        hidden = layers.GRU(5, stateful=True, return_sequences=True)(inputs)
        return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(layers.LSTM(3, stateful=True)(hidden)))

    x = np.random.default_rng(30).normal(size=(32, 4, 2)).astype("float32")
    model = compiled(setting, build)
    found = model.fit(x, labels(32), batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x, labels(32)))
    outputs = [model.predict(x, batch_size=8, verbose=0) for _ in range(2)]
    for layer in model.layers[1:3]:
        layer.reset_state()
    again = model.evaluate(x, labels(32), batch_size=8, verbose=0, return_dict=True)
    return {"history": found.history, "predict": outputs, "again": again}


@scenario(backends=("tensorflow",), worlds=(2,))
def stateful_layers_that_the_first_batch_builds(setting: Setting) -> dict[str, Any]:
    """Their state is as wide as the replica's part of a batch. (On other backends Keras itself cannot build them.)"""

    def build() -> Any:
        return keras.Sequential([layers.SimpleRNN(3, stateful=True), layers.Dense(CLASSES, activation="softmax")])

    x = np.random.default_rng(31).normal(size=(32, 4, 2)).astype("float32")
    predicted = compiled(setting, build).predict(x, batch_size=8, verbose=0)
    # How this metric is merged is found out on predictions, which must leave nothing in the state.
    model = compiled(setting, build, metrics=[Largest()])
    history = model.fit(x, labels(32), batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "predict": predicted}


@scenario(quick=ONE_BACKEND)
def added_loss_after_batch_normalization_over_all_replicas(setting: Setting) -> dict[str, Any]:
    class Penalized(layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.1 * ops.mean(ops.square(inputs)))
            return inputs

    def build() -> Any:
        hidden = [layers.BatchNormalization(synchronized=not setting.alone, epsilon=0.1), Penalized()]
        return keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES, activation="softmax")])

    return fitted(compiled(setting, build), batch_size=11)


class ForEightSamples(layers.Layer):
    def call(self, inputs: Any) -> Any:
        return ops.reshape(inputs, (8, FEATURES))

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, inputs.dtype)


@scenario(plain=False, worlds=(2,), backends=("torch",), quick=ONE_BACKEND)
def a_layer_for_one_batch_size(setting: Setting) -> dict[str, Any]:
    """It is right for the parts of the first batch; the error of another one says that a replica sees a part."""
    with setting.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), ForEightSamples(), layers.Dense(CLASSES)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(features(16), labels(16), batch_size=16, verbose=0)
    for method in (model.train_on_batch, model.test_on_batch):
        with pytest.raises(RuntimeError) as caught:
            method(features(12), labels(12))
        assert "this one 6 samples" in "".join(caught.value.__notes__)
    return {}


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "('softmax')")))
def layer_of_keras_along_the_samples(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        soft = layers.Softmax(axis=0, name="softmax")
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8), soft, layers.Dense(CLASSES)])

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fitted(compiled(setting, build, loss=loss))


@scenario(error=dict.fromkeys(BACKENDS, ("UnsupportedError", "('dense', 'softmax')")))
def activation_of_keras_along_the_samples(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        soft = layers.Softmax(axis=0, name="softmax")
        dense = layers.Dense(8, activation=soft, name="dense")
        return keras.Sequential([keras.Input((FEATURES,)), dense, layers.Dense(CLASSES, name="last")])

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fitted(compiled(setting, build, loss=loss))


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "('dense')")))
def layer_whose_call_is_set(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(CLASSES, name="dense")])
        dense = model.layers[0]
        call = dense.call
        dense.call = lambda inputs, training=None: call(inputs - ops.mean(inputs, axis=0))
        return model

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fitted(compiled(setting, build, loss=loss))
