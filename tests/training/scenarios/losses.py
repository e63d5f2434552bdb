"""Losses whose denominator is not the number of samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import phalanx
from tests.training.scenarios.common import (
    BATCH,
    CLASSES,
    FEATURES,
    compiled,
    features,
    fitted,
    labels,
    numbers,
    observed,
    regressor,
    weights,
)
from tests.training.scenarios.registry import BACKENDS, EACH_KIND, ONE_BACKEND, Setting, add, scenario


@scenario(quick=ONE_BACKEND)
def loss_reduction_sum(setting: Setting) -> dict[str, Any]:
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model = compiled(setting, regressor, loss=loss, optimizer=keras.optimizers.SGD(0.005))
    return fitted(model, y=numbers(), sample_weight=weights()) | observed(model, y=numbers())


@scenario(quick=ONE_BACKEND)
def loss_of_keras_over_several_outputs(setting: Setting) -> dict[str, Any]:
    """Keras stacks the outputs."""

    def two() -> Any:
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, {"pair": (layers.Dense(1)(inputs), layers.Dense(1)(inputs))})

    model = compiled(setting, two, loss={"pair": keras.losses.MeanSquaredError()}, optimizer=keras.optimizers.SGD(0.05))
    return fitted(model, y={"pair": (numbers(), numbers(seed=1))})


@scenario()
def loss_function_of_one_number_with_weights(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, regressor, loss=lambda y, y_pred: ops.mean(ops.square(y - y_pred)))
    weight = weights()
    weight[:16] = 0.0  # a batch of which nothing counts, and one of which the last parts do not
    weight[20:32] = 0.0
    return fitted(model, y=numbers(), sample_weight=weight) | observed(model, y=numbers(), sample_weight=weight)


@scenario()
def loss_reduction_mean_with_sample_weight(setting: Setting) -> dict[str, Any]:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model = compiled(setting, regressor, loss=loss, metrics=["mae"])
    return fitted(model, y=numbers(), sample_weight=weights()) | observed(model, y=numbers(), sample_weight=weights())


@scenario(quick=ONE_BACKEND)
def negative_sample_weights(setting: Setting) -> dict[str, Any]:
    """The weights of a rank's part of a batch sum to nothing, or to less."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model = compiled(setting, regressor, loss=loss, optimizer=keras.optimizers.SGD(0.05))
    weight = weights()
    weight[1:8:2] = -weight[:8:2]
    weight[16:20] *= -1
    return fitted(model, y=numbers(), sample_weight=weight) | observed(model, y=numbers(), sample_weight=weight)


@scenario(quick=ONE_BACKEND)
def batches_of_no_weight_whose_loss_is_not_a_number(setting: Setting) -> dict[str, Any]:
    """Their loss is 0, as in Keras's division by zero weight, whatever the loss of such a sample."""
    loss = keras.losses.Poisson(reduction="mean_with_sample_weight")

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1, kernel_initializer="ones")])

    model = compiled(setting, build, loss=loss, optimizer=keras.optimizers.SGD(0.01))
    x = np.abs(features(6))
    x[1::2] *= -1  # the logarithm of a negative prediction
    data = {"x": x, "y": np.ones((6, 1), "float32"), "sample_weight": np.array([1, 0] * 3, "float32"), "batch_size": 1}
    return fitted(model, **data) | {"evaluate": model.evaluate(**data, verbose=0, return_dict=True)}


@scenario()
def loss_reductions_of_several_outputs(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        hidden = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
        return keras.Model(inputs, [layers.Dense(1, name=name)(hidden) for name in ("a", "b", "c")])

    kinds = ("sum", "mean_with_sample_weight", "sum_over_batch_size")
    model = compiled(
        setting,
        build,
        loss=[keras.losses.MeanSquaredError(reduction=kind) for kind in kinds],
        loss_weights=[0.02, 0.7, 1.0],
        metrics=[["mae"], ["mae"], ["mae"]],
    )
    y = [numbers(seed=seed) for seed in range(3)]
    weight = [weights(), weights()[::-1].copy(), weights()]
    found = fitted(model, features(), y, sample_weight=weight)
    return found | {
        "evaluate": model.evaluate(features(), y, sample_weight=weight, batch_size=16, return_dict=True, verbose=0)
    }


def _sentences(samples: int = 33) -> Any:
    """Token ids with zeros to be masked at the end: the first rows are short, the last ones long, so that the
    ranks' parts hold very different numbers of tokens."""
    tokens = np.random.default_rng(9).integers(1, 12, (samples, 6)).astype("int32")
    for row in range(samples):
        tokens[row, 1 + (row * 6) // samples :] = 0
    return tokens


@scenario(quick=ONE_BACKEND)
def masked_sequences_labelled_by_token(setting: Setting) -> dict[str, Any]:
    """The mean over the unmasked tokens of all ranks."""

    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(12, 4, mask_zero=True),
                layers.LSTM(5, return_sequences=True),
                layers.Dense(CLASSES, activation="softmax"),
            ]
        )

    model = compiled(setting, build, metrics=["accuracy"], weighted_metrics=["accuracy"])
    tokens = _sentences()
    targets = np.random.default_rng(10).integers(0, CLASSES, tokens.shape).astype("int32")
    return fitted(model, tokens, targets) | observed(model, tokens, targets)


@scenario()
def masked_sequences_with_one_label(setting: Setting) -> dict[str, Any]:
    """The mask ends in the recurrent layer; the loss is an ordinary mean."""

    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(12, 4, mask_zero=True),
                layers.GRU(5),
                layers.Dense(CLASSES, activation="softmax"),
            ]
        )

    return fitted(compiled(setting, build), _sentences())


@scenario()
def masked_sequences_with_sample_weight(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        return keras.Sequential(
            [keras.Input((5, 2)), layers.Masking(), layers.SimpleRNN(4, return_sequences=True), layers.Dense(1)]
        )

    x = np.random.default_rng(11).normal(size=(33, 5, 2)).astype("float32")
    for row in range(33):
        x[row, 1 + row % 5 :] = 0.0
    y = np.random.default_rng(12).normal(size=(33, 5, 1)).astype("float32")
    found = {}
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
        model = compiled(setting, build, loss=keras.losses.MeanSquaredError(reduction=reduction))
        # Keras wants the weights in the mask's shape here.
        found[reduction] = fitted(model, x, y, sample_weight=np.repeat(weights()[:, None], 5, axis=1))
    return found


@scenario(quick=ONE_BACKEND)
def masked_sequences_with_a_loss_of_the_program(setting: Setting) -> dict[str, Any]:
    """The mask reaches it as it does a loss of Keras's."""

    class Error(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return ops.mean(ops.abs(y_true - y_pred), axis=-1)

    def build() -> Any:
        return keras.Sequential([keras.Input((5, 2)), layers.Masking(), layers.Dense(1)])

    x = np.random.default_rng(11).normal(size=(33, 5, 2)).astype("float32")
    for row in range(33):
        x[row, 1 + row % 5 :] = 0.0
    y = np.random.default_rng(12).normal(size=(33, 5, 1)).astype("float32")
    losses = (Error(), Error(reduction="sum"))
    return {loss.reduction: fitted(compiled(setting, build, loss=loss), x, y) for loss in losses}


@scenario(quick=EACH_KIND)
def a_rank_whose_samples_are_all_masked(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        return keras.Sequential([keras.Input((5, 2)), layers.Masking(), layers.Dense(1)])

    x = np.random.default_rng(13).normal(size=(16, 5, 2)).astype("float32")
    x[5:] = 0.0
    y = np.random.default_rng(14).normal(size=(16, 5, 1)).astype("float32")
    return fitted(compiled(setting, build, loss="mse"), x, y)


@scenario()
def ignored_class(setting: Setting) -> dict[str, Any]:
    """The loss itself creates the mask."""

    def build() -> Any:
        return keras.Sequential([keras.Input((4, 2)), layers.Dense(CLASSES, activation="softmax")])

    x = np.random.default_rng(15).normal(size=(33, 4, 2)).astype("float32")
    y = np.random.default_rng(16).integers(0, CLASSES, (33, 4)).astype("int32")
    y[:12] = np.where(np.arange(4) > 0, 1, y[:12])
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=1)
    model = compiled(setting, build, loss=loss)
    return fitted(model, x, y) | observed(model, x, y)


def _in_batch_negatives(y: Any, y_pred: Any) -> Any:
    """Each sample's prediction should be most similar to its own target, among all of the batch."""
    scores = ops.matmul(y_pred, ops.transpose(ops.cast(y, y_pred.dtype)))
    return keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(scores)[0]), scores, from_logits=True)


class SupervisedContrastive(keras.losses.Loss):  # type: ignore[misc]
    """Overrides `__call__`, as the contrastive loss of Keras's examples does, so that Keras's own never runs."""

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return ops.mean(_in_batch_negatives(y, y_pred))


RELATING: dict[str, Callable[[], Any]] = {
    "by_one_number": keras.losses.Dice,
    "by_a_value_of_each": lambda: phalanx.losses.OverGlobalBatch(_in_batch_negatives),
    "with_a_mask": keras.losses.Circle,
    "in_its_own_call": lambda: phalanx.losses.OverGlobalBatch(SupervisedContrastive()),
}


def _relating(name: str) -> Callable[[Setting], dict[str, Any]]:
    """Over the global batch, with parts of unequal size, an empty one, and sample weights."""

    def run(setting: Setting) -> dict[str, Any]:
        y = labels() if name == "with_a_mask" else np.abs(features())[:, :CLASSES]
        model = compiled(setting, partial(_mapper, normalizes=name == "with_a_mask"), loss=RELATING[name]())
        weight = weights() if name in ("by_a_value_of_each", "with_a_mask") else None
        return fitted(model, y=y, sample_weight=weight) | observed(model, y=y, sample_weight=weight)

    return run


for _name in RELATING:
    add(f"loss_that_relates_samples_{_name}", _relating(_name), quick=BACKENDS if "value" in _name else ONE_BACKEND)


def _summed(y: Any, y_pred: Any) -> Any:
    return ops.sum(ops.square(y - y_pred))


def _averaged(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y - y_pred))


def _one_number(
    loss: Any, *, adds: bool = False, computes: bool = False, weighted: bool = False
) -> Callable[[Setting], dict[str, Any]]:
    """A sum or a mean over the batch.

    Args:
        loss: Loss function of the batch.
        adds: Whether a layer adds losses that are scalars and losses that are vectors.
        computes: Whether the model returns the loss from `compute_loss`.
        weighted: Whether there are sample weights.
    """

    class Adds(layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.01 * ops.sum(ops.square(inputs)))
            self.add_loss(0.1 * ops.mean(ops.abs(inputs)))
            self.add_loss(0.01 * ops.ones((8,)) * ops.cast(ops.shape(inputs)[-1], "float32"))
            return inputs

    class Computes(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            return loss(y, y_pred)

    def build() -> Any:
        hidden = [layers.Dense(8, activation="tanh"), *([Adds()] if adds else [])]
        kind = Computes if computes else keras.Sequential
        return kind([keras.Input((FEATURES,)), *hidden, layers.Dense(1)])

    def run(setting: Setting) -> dict[str, Any]:
        given = "mse" if computes else loss
        model = compiled(setting, build, loss=given, optimizer=keras.optimizers.SGD(0.005))
        weight = weights() if weighted else None
        return fitted(model, y=numbers(), sample_weight=weight) | observed(model, y=numbers(), sample_weight=weight)

    return run


add("loss_that_is_one_number", _one_number(_summed, adds=True, weighted=True), quick=ONE_BACKEND)
add("loss_that_is_a_mean_with_added_losses", _one_number(_averaged, adds=True), quick=ONE_BACKEND)
add("loss_of_compute_loss_that_is_one_number", _one_number(_summed, computes=True), quick=ONE_BACKEND)


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "OverGlobalBatch")))
def a_loss_that_is_a_ratio_of_two_sums(setting: Setting) -> dict[str, Any]:
    def masked(y: Any, y_pred: Any) -> Any:
        mask = ops.cast(y != 0, "float32")
        return ops.sum(ops.square(y - y_pred) * mask) / ops.sum(mask)

    return fitted(compiled(setting, regressor, loss=masked), y=numbers())


@scenario(quick=ONE_BACKEND)
def one_array_of_targets_for_two_outputs(setting: Setting) -> dict[str, Any]:
    """Some parts of a batch have as many samples as the model has outputs."""

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        hidden = keras.layers.Dense(5)(inputs)
        return keras.Model(inputs, [keras.layers.Dense(7)(hidden), hidden])

    model = compiled(setting, build, loss=["mse", None])
    y = numbers(16, 7)
    found = fitted(model, features(16), y, batch_size=4)
    return {**found, "evaluate": model.evaluate(features(16), y, batch_size=4, verbose=0)}


class IgnoringTargets(keras.Model):
    def test_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"size": ops.mean(ops.abs(self(x)))}


@scenario(backends=("tensorflow", "torch"), quick=("torch",))
def a_sum_of_which_an_evaluation_without_targets_says_nothing(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return IgnoringTargets(inputs, keras.layers.Dense(1)(inputs))

    def total(y: Any, y_pred: Any) -> Any:
        return ops.sum(ops.square(y - y_pred))

    model = compiled(setting, build, loss=total, optimizer=keras.optimizers.SGD(0.01))
    found = fitted(model, y=numbers())
    return {**found, "evaluate": model.evaluate(features(), batch_size=8, verbose=0)}


def _hardest(y: Any, y_pred: Any) -> Any:
    """Of the seven samples of a batch with the largest losses: the first parts that are tried have fewer."""
    return ops.mean(ops.top_k(ops.mean(ops.square(y - y_pred), axis=-1), 7)[0])


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "The loss '_hardest'")))
def a_loss_of_the_hardest_samples(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, regressor, loss=_hardest), features(48), numbers(48), batch_size=24)


@scenario(quick=ONE_BACKEND)
def a_loss_of_the_hardest_samples_over_the_global_batch(setting: Setting) -> dict[str, Any]:
    loss = _hardest if setting.alone else phalanx.losses.OverGlobalBatch(_hardest)
    return fitted(compiled(setting, regressor, loss=loss), features(48), numbers(48), batch_size=24)


def _of_at_most_sixteen(y: Any, y_pred: Any) -> Any:
    """Of a few samples it is a mean over all of them."""
    losses = ops.mean(ops.square(y - y_pred), axis=-1)
    return ops.mean(ops.top_k(losses, min(16, y_pred.shape[0] or 16))[0])


def _of_positives(y: Any, y_pred: Any) -> Any:
    """Zero, or no number, where there are none."""
    mask = ops.cast(y > 0, "float32")
    return ops.sum(mask * ops.square(y - y_pred)) / ops.sum(mask)


def _with_rare_positives(first: int) -> Any:
    return ((np.arange(96) >= first) & (np.arange(96) % 5 == 0)).astype("float32").reshape(-1, 1)


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "The loss '_of_at_most_sixteen'")))
def a_loss_of_at_most_sixteen_samples(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, regressor, loss=_of_at_most_sixteen), features(96), numbers(96), batch_size=48)


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "The loss '_of_positives'")))
def a_loss_of_positives_that_the_first_samples_are_not(setting: Setting) -> dict[str, Any]:
    return fitted(
        compiled(setting, regressor, loss=_of_positives), features(96), _with_rare_positives(48), batch_size=48
    )


@scenario(error=dict.fromkeys(BACKENDS, ("UnsupportedError", "passes to add_loss")))
def an_added_loss_of_positives_that_the_first_samples_are_not(setting: Setting) -> dict[str, Any]:
    class Positives(layers.Layer):
        def call(self, inputs: Any, targets: Any) -> Any:
            self.add_loss(_of_positives(targets, inputs))
            return inputs

    def build() -> Any:
        inputs, targets = keras.Input((FEATURES,)), keras.Input((1,))
        return keras.Model([inputs, targets], Positives()(layers.Dense(1)(inputs), targets))

    y = _with_rare_positives(14)
    return fitted(compiled(setting, build, loss=None), [features(96), y], y, batch_size=48)


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "The loss '_of_stacked_pairs'")))
def a_loss_that_relates_samples_along_another_axis(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, ops.stack([layers.Dense(4)(inputs), layers.Dense(4)(inputs)], axis=0))

    return fitted(compiled(setting, build, loss=_of_stacked_pairs), features(32), np.zeros(32, "float32"))


def _of_stacked_pairs(y: Any, y_pred: Any) -> Any:
    similar = ops.matmul(y_pred[0], ops.transpose(y_pred[1]))
    return ops.mean(ops.logsumexp(similar, axis=-1))


@scenario(error=dict.fromkeys(BACKENDS, ("UnsupportedError", "passes to add_loss")))
def an_added_loss_of_the_hardest_samples(setting: Setting) -> dict[str, Any]:
    class Hardest(layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(_hardest(0.0, inputs))
            return inputs

        def compute_output_spec(self, inputs: Any) -> Any:
            return keras.KerasTensor(inputs.shape, inputs.dtype)

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(3), Hardest(), layers.Dense(1)])

    return fitted(compiled(setting, build, loss="mse"), features(48), numbers(48), batch_size=24)


@scenario(error=dict.fromkeys(BACKENDS, ("UnsupportedError", "OverGlobalBatch")))
def a_loss_of_each_sample_that_depends_on_others(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, partial(_mapper, normalizes=False), loss=_in_batch_negatives)
    return fitted(model, y=np.abs(features())[:, :CLASSES])


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "OverGlobalBatch")))
def a_loss_with_its_own_call_that_relates_samples(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, partial(_mapper, normalizes=False), loss=SupervisedContrastive())
    return fitted(model, y=np.abs(features())[:, :CLASSES])


@scenario(worlds=(2,), error=dict.fromkeys(BACKENDS, ("UnsupportedError", "is the sum over the batch as one number")))
def a_loss_with_its_own_call_that_is_a_sum(setting: Setting) -> dict[str, Any]:
    class Summed(keras.losses.Loss):  # type: ignore[misc]
        def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return ops.sum(ops.square(y - y_pred))

    return fitted(compiled(setting, regressor, loss=Summed()), y=numbers())


@scenario(quick=ONE_BACKEND)
def a_compute_loss_that_calls_a_loss_over_the_global_batch(setting: Setting) -> dict[str, Any]:
    class Contrastive(keras.losses.Loss):  # type: ignore[misc]
        def call(self, y: Any, y_pred: Any) -> Any:
            return _in_batch_negatives(y, y_pred)

    class Computes(keras.Model):  # type: ignore[misc]
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return Computes(inputs, layers.Dense(CLASSES)(inputs))

    model = compiled(setting, build, loss=phalanx.losses.OverGlobalBatch(Contrastive()))
    return fitted(model, y=np.abs(features())[:, :CLASSES])


def _mapper(*, normalizes: bool) -> Any:
    inputs = keras.Input((FEATURES,))
    outputs = layers.Dense(CLASSES, activation=None if normalizes else "sigmoid")(inputs)
    return keras.Model(inputs, layers.UnitNormalization()(outputs) if normalizes else outputs)


@scenario(error=dict.fromkeys(("jax", "tensorflow", "torch"), ("UnsupportedError", "reduction")))
def loss_without_reduction(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, regressor, loss=keras.losses.MeanSquaredError(reduction="none")), y=numbers())


@scenario()
def crossentropy_from_logits_with_label_smoothing(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(CLASSES)])

    y = np.eye(CLASSES, dtype="float32")[np.random.default_rng(17).integers(0, CLASSES, 33)]
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return fitted(compiled(setting, build, loss=loss), y=y, sample_weight=weights())


@scenario()
def averages_over_the_global_batch(setting: Setting) -> dict[str, Any]:
    """As programs for `tf.distribute` have them, in `compute_loss`, with a last batch that is smaller."""

    class Model(keras.Sequential):
        known: bool

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            losses = keras.losses.sparse_categorical_crossentropy(y, y_pred)
            size = BATCH if self.known else None
            penalty = phalanx.scale_regularization_loss(keras.ops.sum(self.weights[0] ** 2))
            return phalanx.compute_average_loss(losses, global_batch_size=size) + 0.01 * penalty

    found = {}
    for known in True, False:

        def build(known: bool = known) -> Any:
            model = Model([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, activation="softmax")])
            model.known = known
            return model

        found[str(known)] = fitted(compiled(setting, build))
        with setting.scope():  # as many programs call it
            found[f"{known}, inside"] = fitted(compiled(setting, build))
    return found


class Annealed(keras.losses.Loss):
    """Grows with each call, as schedules do that count in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, y: Any, y_pred: Any) -> Any:
        self.calls += 1
        return min(1.0, self.calls / 9) * ops.mean((ops.cast(y, y_pred.dtype) - y_pred) ** 2, axis=-1)


# Elsewhere, steps are compiled, and count once in Python.
@scenario(backends=("torch",))
def loss_that_counts_its_calls(setting: Setting) -> dict[str, Any]:
    calls = 0

    def growing(y: Any, y_pred: Any) -> Any:
        nonlocal calls
        calls += 1
        return min(1.0, calls / 9) * ops.mean((ops.cast(y, y_pred.dtype) - y_pred) ** 2, axis=-1)

    loss = Annealed()
    found = [fitted(compiled(setting, regressor, loss=each), y=numbers()) for each in (loss, growing)]
    return {"of_object": found[0], "of_closure": found[1], "calls": [loss.calls, calls]}


class Raising(keras.callbacks.Callback):
    """Raises a weight from zero at the beginning of the second epoch, as programs anneal a term of a loss."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.weight.assign(0.5 * epoch)


def _annealed(setting: Setting, term: Callable[[Any], Any], *, by_layer: bool) -> dict[str, Any]:
    weight = keras.Variable(0.0, trainable=False, name="weight")

    class Term(layers.Layer):
        def call(self, inputs: Any) -> Any:
            if by_layer:
                self.add_loss(weight * term(inputs))
            return inputs

    def loss(y: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y - y_pred)) + (0.0 if by_layer else weight * term(y_pred))

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4, "tanh"), Term(), layers.Dense(1)])

    model = compiled(setting, build, loss=loss, optimizer=keras.optimizers.SGD(0.05))
    return fitted(model, y=numbers(), epochs=3, callbacks=[Raising(weight)])


@scenario(quick=ONE_BACKEND)
def layer_whose_added_sum_begins_later(setting: Setting) -> dict[str, Any]:
    return _annealed(setting, lambda values: 0.01 * ops.sum(ops.square(values)), by_layer=True)


@scenario(quick=ONE_BACKEND)
def term_of_a_loss_that_begins_later(setting: Setting) -> dict[str, Any]:
    return _annealed(setting, lambda values: ops.mean(ops.square(values)), by_layer=False)


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "OverGlobalBatch")))
def ratio_in_a_loss_that_begins_later(setting: Setting) -> dict[str, Any]:
    return _annealed(setting, lambda values: ops.mean(ops.square(values - ops.mean(values))), by_layer=False)


# Elsewhere, compiled steps do not see what is in Python.
@scenario(backends=("torch",), error={"torch": ("UnsupportedError", "is a sum over the batch now, and was zero")})
def added_sum_whose_weight_in_python_begins_later(setting: Setting) -> dict[str, Any]:
    class Term(layers.Layer):
        weight = 0.0

        def call(self, inputs: Any) -> Any:
            self.add_loss(self.weight * ops.sum(ops.square(inputs)))
            return inputs

    term = Term()
    term.weight = 0.0

    def raise_weight(epoch: int, logs: Any) -> None:
        term.weight = 0.01 * epoch

    model = compiled(setting, lambda: keras.Sequential([keras.Input((FEATURES,)), term, layers.Dense(1)]), loss="mse")
    return fitted(model, y=numbers(), callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=raise_weight)])


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "passes to add_loss")))
def balance_of_experts_that_all_samples_go_past(setting: Setting) -> dict[str, Any]:
    """With these samples, one expert gets all: the balance of a Switch Transformer is a mean there."""

    class Router(layers.Layer):
        def call(self, inputs: Any) -> Any:
            shares = ops.softmax(ops.stack([ops.sum(inputs, axis=-1), ops.zeros_like(inputs[:, 0])], axis=-1))
            chosen = ops.mean(ops.one_hot(ops.argmax(shares, axis=-1), 2), axis=0)
            self.add_loss(0.1 * ops.sum(chosen * ops.mean(shares, axis=0)))
            return inputs

    model = compiled(
        setting, lambda: keras.Sequential([keras.Input((FEATURES,)), Router(), layers.Dense(1)]), loss="mse"
    )
    x = abs(features())
    x[0, 0], x[0, 1] = x.max(), -x.max()
    return fitted(model, x, numbers())


class MaskedError(keras.losses.MeanSquaredError):
    """A Keras loss with a custom `call`."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        mask = ops.cast(y_true > 0, "float32")
        return ops.sum(ops.square(y_true - y_pred) * mask) / ops.sum(mask)


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "OverGlobalBatch")))
def loss_of_keras_with_another_call(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, regressor, loss=MaskedError()), y=numbers())


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "OverGlobalBatch")))
def loss_of_keras_whose_call_is_set(setting: Setting) -> dict[str, Any]:
    loss = keras.losses.MeanSquaredError()
    loss.call = MaskedError().call
    return fitted(compiled(setting, regressor, loss=loss), y=numbers())


@scenario(quick=ONE_BACKEND)
def losses_of_keras_along_the_samples(setting: Setting) -> dict[str, Any]:
    """The last global batch has samples for only one replica."""
    found = {}
    for loss in (keras.losses.CosineSimilarity(axis=0), keras.losses.CosineSimilarity(axis=-2, name="from_the_end")):
        model = compiled(setting, loss=loss)
        found[loss.name] = fitted(model, y=keras.utils.to_categorical(labels(), CLASSES))
    return found


def _flat() -> Any:
    """A model whose outputs have no axis but that of the samples."""
    flat = layers.Reshape(())
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4, "tanh"), layers.Dense(1, "sigmoid"), flat])


@scenario(quick=ONE_BACKEND)
def losses_of_keras_of_flat_outputs(setting: Setting) -> dict[str, Any]:
    """Keras takes the samples for classes."""
    y = (numbers()[:, 0] > 0).astype("float32")
    names = ("kl_divergence", "categorical_hinge", "cosine_similarity", "mse", "binary_crossentropy", "hinge")
    return {name: fitted(compiled(setting, _flat, loss=name), y=y, sample_weight=weights()) for name in names}
