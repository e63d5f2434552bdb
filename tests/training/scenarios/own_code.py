"""Layers and training steps of a program's own: what replicas would compute otherwise is an error before the first
step, and what only looks like it is not."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.training.scenarios.common import (
    BATCH,
    FEATURES,
    compiled,
    features,
    fitted,
    fitted_on,
    labels,
    numbers,
    observed,
    regressor,
)
from tests.training.scenarios.registry import BACKENDS, EACH_KIND, ONE_BACKEND, Setting, scenario


def _refused(text: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(BACKENDS, ("UnsupportedError", text))


class Tracking(layers.Layer):
    """Counts its calls, averages, and perhaps sums, what it sees."""

    def __init__(self, *, sums: bool = False) -> None:
        super().__init__(name="tracking")
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls")
        self.average = self.add_weight(shape=(FEATURES,), initializer="zeros", trainable=False, name="average")
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False, name="total")
        self.sums = sums

    def call(self, inputs: Any) -> Any:
        self.calls.assign(self.calls + 1)
        self.average.assign(0.9 * self.average + 0.1 * ops.mean(inputs, axis=0))
        if self.sums:
            self.total.assign(self.total + ops.sum(inputs))
        return inputs


class Centering(layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


def _with(*inside: Any) -> Callable[[], Any]:
    return lambda: keras.Sequential([keras.Input((FEATURES,)), *[make() for make in inside], layers.Dense(1)])


def _trained(setting: Setting, build: Callable[[], Any], **arguments: Any) -> dict[str, Any]:
    return fitted(compiled(setting, build, loss="mse", **arguments), y=numbers())


@scenario(quick=ONE_BACKEND)
def layer_that_averages(setting: Setting) -> dict[str, Any]:
    return _trained(setting, _with(Tracking))


@scenario(quick=("torch",), error=_refused("tracking/total'"))
def layer_that_sums(setting: Setting) -> dict[str, Any]:
    return _trained(setting, _with(lambda: Tracking(sums=True)))


@scenario(quick=ONE_BACKEND, error=_refused("'centering') computes something of all samples"))
def layer_that_uses_the_mean_of_the_batch(setting: Setting) -> dict[str, Any]:
    return _trained(setting, _with(lambda: layers.Dense(4), Centering))


@scenario(quick=ONE_BACKEND, error=_refused("'similarities') computes something of all samples"))
def layer_of_another_library_that_relates_samples(setting: Setting) -> dict[str, Any]:
    """As the head of KerasHub's CLIP, which multiplies the texts of a batch with its images."""

    class Similarities(layers.Layer):
        __module__ = "keras_hub.src.models.clip.clip_layers"

        def call(self, inputs: Any) -> Any:
            return ops.mean(inputs @ ops.transpose(inputs), axis=1, keepdims=True)

    return _trained(setting, _with(lambda: layers.Dense(4), lambda: Similarities(name="similarities")))


@scenario(error=_refused("'nearly') computes something of all samples"))
def layer_that_uses_a_little_of_the_mean(setting: Setting) -> dict[str, Any]:
    """Less than gradients may differ by."""

    class Nearly(layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs - 4e-3 * ops.mean(inputs, axis=0, keepdims=True)

    return _trained(setting, _with(lambda: layers.Dense(4), lambda: Nearly(name="nearly")))


class Groups(layers.Layer):
    """Of four, where it can make any: what is tried first must be such a number."""

    def call(self, inputs: Any) -> Any:
        size = inputs.shape[0] or 4
        groups = ops.reshape(inputs, (4, -1, inputs.shape[-1])) if size % 4 == 0 else inputs[None]
        spread = ops.reshape(ops.mean(ops.std(groups, axis=0)), (1, 1))
        return ops.concatenate([inputs, ops.repeat(spread, size, axis=0)], axis=-1)

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor((*inputs.shape[:-1], inputs.shape[-1] + 1), inputs.dtype)


@scenario(quick=ONE_BACKEND, backends=("jax", "torch"), error=_refused("'groups') computes something of all samples"))
def layer_that_groups_samples_where_it_can(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, _with(lambda: layers.Dense(4), lambda: Groups(name="groups")), loss="mse")
    return fitted(model, features(48), numbers(48), batch_size=24)


class CenteringLargeBatches(layers.Layer):
    """Of more samples than any replica has."""

    def call(self, inputs: Any) -> Any:
        large = (inputs.shape[0] or 0) > 40
        return inputs - ops.mean(inputs, axis=0, keepdims=True) if large else inputs

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, inputs.dtype)


@scenario(quick=ONE_BACKEND, backends=("jax", "torch"), error=_refused("'large') computes something of all samples"))
def layer_that_uses_the_mean_of_a_large_batch(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, _with(lambda: CenteringLargeBatches(name="large")), loss="mse")
    return fitted(model, features(96), numbers(96), batch_size=48)


@scenario(quick=ONE_BACKEND, backends=("jax", "torch"))
def predictions_that_use_the_mean_of_a_large_batch(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, _with(lambda: CenteringLargeBatches(name="large")), loss="mse")
    return {"predict": model.predict(features(96), batch_size=48, verbose=0)}


class Halves(layers.Layer):
    """Parts of the trial that have an odd number of samples cannot be computed."""

    def call(self, inputs: Any) -> Any:
        first, second = ops.split(inputs, 2, axis=0)
        return ops.concatenate([first - second, second], axis=0)

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, inputs.dtype)


@scenario(quick=EACH_KIND, error=_refused("'halves') computes something of all samples"))
def layer_that_pairs_the_halves_of_a_batch(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, _with(lambda: layers.Dense(4), lambda: Halves(name="halves")), loss="mse")
    return fitted(model, features(48), numbers(48), batch_size=24)


@scenario(quick=ONE_BACKEND)
def predictions_of_the_halves_of_a_batch(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, _with(lambda: layers.Dense(4), lambda: Halves(name="halves")), loss="mse")
    return {"predict": model.predict(features(96), batch_size=48, verbose=0)}


@scenario(error=_refused("'following') computes something of all samples"))
def layer_that_uses_its_moving_average_at_once(setting: Setting) -> dict[str, Any]:
    """It moves gradients by a ten-thousandth, and a loss by even less: the means of two halves have the same mean."""

    class Following(layers.Layer):
        def build(self, shape: Any) -> None:
            self.average = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.average.assign(0.9 * self.average + 0.1 * ops.mean(inputs))
            return inputs * (1 + 0.1 * self.average)

    following = _with(lambda: layers.Dense(8, activation="tanh"), lambda: Following(name="following"))
    return _trained(setting, following, optimizer=keras.optimizers.AdamW(0.01))


@scenario(error=_refused("an operation between the layers computes something of all samples"))
def operation_on_the_mean_of_the_batch(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        hidden = layers.Dense(4)(inputs)
        return keras.Model(inputs, layers.Dense(1)(hidden - ops.mean(hidden, axis=0, keepdims=True)))

    return _trained(setting, build)


def _cubes(activity: Any) -> Any:
    return 0.1 * ops.sum(ops.abs(activity) ** 3)


@scenario(quick=("torch",))
def functions_of_each_sample_in_a_layer(setting: Setting) -> dict[str, Any]:
    own = {"activation": lambda values: values * ops.sigmoid(values), "activity_regularizer": _cubes}
    return _trained(setting, _with(lambda: layers.Dense(4, **own)))


@scenario(quick=("torch",), error=_refused("Keras divides what an activity regularizer returns"))
def activity_regularizer_that_returns_a_mean(setting: Setting) -> dict[str, Any]:
    return _trained(setting, _with(lambda: layers.Dense(4, activity_regularizer=lambda activity: ops.mean(activity))))


@scenario(error=_refused("'centered') computes something of all samples"))
def activation_that_uses_the_mean_of_the_batch(setting: Setting) -> dict[str, Any]:
    def centered(values: Any) -> Any:
        return ops.tanh(values - ops.mean(values, axis=0))

    return _trained(setting, _with(lambda: layers.Dense(4, activation=centered, name="centered")))


@scenario(quick=("torch",), error=_refused("dB below the loudest sample of a batch"))
def spectrogram_relative_to_the_loudest_sample(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        sizes = {"fft_length": 4, "sequence_stride": 2, "num_mel_bins": 2, "sampling_rate": 100, "min_freq": 1.0}
        spectrograms = [layers.MelSpectrogram(**sizes, **cut) for cut in ({"top_db": float("inf")}, {})]
        inputs = keras.Input((FEATURES,))
        whole, cut = [layers.Flatten()(spectrogram(inputs)) for spectrogram in spectrograms]
        return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([whole, cut])))

    return _trained(setting, build)


def _mean_square(prediction: Any, y: Any) -> Any:
    return ops.mean(ops.square(prediction - y))


def _stepping(change: Any = None, log: Any = None, loss_of: Callable[..., Any] = _mean_square) -> type:
    """A model with a `train_step` that changes gradients before they are applied, and logs what it computes of them."""

    class Jax(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            import jax

            trainable, others, optimizer, metrics = state
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

            def compute(trainable: Any) -> Any:
                prediction, changed = self.stateless_call(trainable, others, x, training=True)
                return loss_of(prediction, y), changed

            (loss, others), gradients = jax.value_and_grad(compute, has_aux=True)(trainable)
            gradients = change(gradients) if change else gradients
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            return {"error": loss, **(log(gradients) if log else {})}, (trainable, others, optimizer, metrics)

    class Other(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            loss, gradients = _gradients(lambda: loss_of(self(x, training=True), y), self.trainable_variables)
            gradients = change(gradients) if change else gradients
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"error": loss, **(log(gradients) if log else {})}

    return Jax if keras.backend.backend() == "jax" else Other


def _gradients(loss_of: Callable[[], Any], variables: Any) -> tuple[Any, Any]:
    values = [variable.value for variable in variables]
    if keras.backend.backend() == "torch":
        import torch

        loss = loss_of()
        return loss.detach(), list(torch.autograd.grad(loss, values))
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of()
    return loss, tape.gradient(loss, values)


def _norm(gradients: Any) -> Any:
    return ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in gradients))


def _clipped(gradients: Any) -> Any:
    factor = ops.minimum(1.0, 0.1 / _norm(gradients))
    return [gradient * factor for gradient in gradients]


def _dense(kind: type, *inside: Any) -> Callable[[], Any]:
    def build() -> Any:
        inputs = hidden = keras.Input((FEATURES,))
        for make in (*inside, lambda: layers.Dense(1)):
            hidden = make()(hidden)
        return kind(inputs, hidden)

    return build


@scenario(quick=BACKENDS, error=_refused("what its train_step does with them before"))
def own_train_step_that_clips_by_hand(setting: Setting) -> dict[str, Any]:
    return _trained(setting, _dense(_stepping(_clipped)))


def _of_at_most_sixteen(prediction: Any, y: Any) -> Any:
    losses = ops.mean(ops.square(prediction - y), axis=-1)
    return ops.mean(ops.top_k(losses, min(16, losses.shape[0] or 16))[0])


@scenario(quick=ONE_BACKEND, error=_refused("Either its loss is no mean over the samples"))
def own_train_step_that_takes_at_most_sixteen_samples(setting: Setting) -> dict[str, Any]:
    """Fewer than that are what is tried first."""
    model = compiled(setting, _dense(_stepping(loss_of=_of_at_most_sixteen)), loss="mse")
    return fitted(model, features(96), numbers(96), batch_size=48)


@scenario(error=_refused("its train_step logs 'norm'"))
def own_train_step_that_logs_a_norm(setting: Setting) -> dict[str, Any]:
    return _trained(setting, _dense(_stepping(log=lambda gradients: {"norm": _norm(gradients)})))


class Adding(keras.Model):
    """Logs the sum of two results of metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.squares, self.sizes = keras.metrics.Mean("squares"), keras.metrics.Mean("sizes")

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss, gradients = _gradients(lambda: _mean_square(self(x, training=True), y), self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.squares.update_state(loss)
        self.sizes.update_state(ops.mean(ops.abs(self(x) - y)))
        return {"squares": self.squares.result(), "total": self.squares.result() + self.sizes.result()}


@scenario(backends=("tensorflow", "torch"), quick=("torch",), error=_refused("it logs another 'total'"))
def own_train_step_that_adds_results_of_metrics(setting: Setting) -> dict[str, Any]:
    return _trained(setting, _dense(Adding))


class NamingTwice(keras.Model):
    """Its `metrics` name one that Keras names, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sizes = keras.metrics.Mean("sizes")

    @property
    def metrics(self) -> list[Any]:
        return [self.sizes, *super().metrics]

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        self.sizes.update_state(ops.mean(ops.abs(y_pred)))
        return _mean_square(y_pred, y)


@scenario(quick=("jax", "torch"))
def metrics_that_name_one_twice(setting: Setting) -> dict[str, Any]:
    return _validated(compiled(setting, _dense(NamingTwice)))


class Reducing(keras.Model):
    """Reduces in its steps what the compiled loss leaves."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss, gradients = _gradients(lambda: ops.mean(self.loss(y, self(x, training=True))), self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"error": loss}

    def test_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"error": ops.mean(self.loss(y, self(x)))}


@scenario(backends=("tensorflow", "torch"), quick=("torch",))
def own_steps_that_reduce_a_loss(setting: Setting) -> dict[str, Any]:
    loss = keras.losses.MeanSquaredError(reduction="none")
    return _validated(compiled(setting, _dense(Reducing), loss=loss))


class Doubling(keras.Model):
    """Doubles what it trains on, as PyTorch's modules know it: not by an argument, but by their mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = layers.Dense(4), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.outer(self.inner(inputs) * (2.0 if self.training else 1.0))


@scenario(backends=("torch",), quick=("torch",))
def model_that_depends_on_its_mode(setting: Setting) -> dict[str, Any]:
    """A test between two batches ends the training mode for the rest of the epoch, and so for all replicas."""
    x, y = features(), numbers()
    model = compiled(setting, Doubling, loss="mse", optimizer=keras.optimizers.SGD(0.05))
    modes = []

    def test(batch: int, logs: Any) -> None:
        modes.append(model.training)
        if batch == 1:
            model.evaluate(x, y, verbose=0)

    found = fitted(model, x, y, validation_data=(x, y))
    tested = fitted(model, x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=test)])
    return {**found, "tested": tested, "modes": [*modes, model.training], **observed(model, x, y)}


@scenario(backends=("torch",), quick=("torch",))
def own_train_step_whose_loss_gets_a_number(setting: Setting) -> dict[str, Any]:
    square = keras.losses.MeanSquaredError()
    stepping = _stepping(loss_of=lambda prediction, y: square(y - prediction, 0.0))
    return _trained(setting, _dense(stepping))


def _texts() -> Any:
    """Batches of texts of one to nine words."""
    import tensorflow as tf

    words = ("good", "bad", "fine", "poor")
    texts = [" ".join(words[(7 * i + j) % 4] for j in range(1 + 5 * i % 9)) for i in range(33)]
    return tf.data.Dataset.from_tensor_slices((texts, numbers())).batch(BATCH)


def _reader(setting: Setting, *, mask_zero: bool = False, length: int | None = None) -> Any:
    def build() -> Any:
        reading = layers.TextVectorization(vocabulary=["good", "bad", "fine", "poor"], output_sequence_length=length)
        embedding = layers.Embedding(9, 4, mask_zero=mask_zero)
        return keras.Sequential(
            [keras.Input((), dtype="string"), reading, embedding, layers.GlobalAveragePooling1D(), layers.Dense(1)]
        )

    return compiled(setting, build, loss="mse")


@scenario(
    backends=("tensorflow",), quick=("tensorflow",), error=_refused("'text_vectorization' pads texts to the longest")
)
def texts_padded_to_the_longest_of_a_batch(setting: Setting) -> dict[str, Any]:
    return fitted_on(_reader(setting), _texts())


@scenario(backends=("tensorflow",), quick=("tensorflow",))
def predictions_of_texts_padded_to_the_longest_of_a_batch(setting: Setting) -> dict[str, Any]:
    return {"predict": _reader(setting).predict(_texts(), verbose=0)}


@scenario(backends=("tensorflow",), quick=("tensorflow",))
def texts_with_masked_padding_or_of_equal_length(setting: Setting) -> dict[str, Any]:
    found = {}
    for name, model in (("masked", _reader(setting, mask_zero=True)), ("equal", _reader(setting, length=5))):
        trained = fitted_on(model, _texts(), validation_data=_texts())
        found[name] = {**trained, "predict": model.predict(_texts(), verbose=0)}
    return found


def _hooked(setting: Setting, hook: Callable[[Any], Any]) -> dict[str, Any]:
    model = compiled(setting, regressor, loss="mse", optimizer=keras.optimizers.SGD(0.05))
    for variable in model.trainable_variables:
        variable.value.register_hook(hook)
    return fitted(model, features(), numbers())


@scenario(backends=("torch",), quick=("torch",), error=_refused("would not compute"))
def gradient_hooks_that_clip(setting: Setting) -> dict[str, Any]:
    return _hooked(setting, lambda gradient: gradient.clamp(-0.01, 0.01))


@scenario(backends=("torch",), quick=("torch",))
def gradient_hooks_that_scale(setting: Setting) -> dict[str, Any]:
    return _hooked(setting, lambda gradient: 0.5 * gradient)


@scenario(backends=("torch",), quick=("torch",))
def gradients_that_a_callback_reads(setting: Setting) -> dict[str, Any]:
    model, norms = compiled(setting, regressor, loss="mse"), []

    def read(batch: int, logs: Any) -> None:
        norms.append([float(weight.value.grad.norm()) for weight in model.trainable_variables])

    found = fitted(model, features(), numbers(), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=read)])
    return {**found, "norms": norms}


@scenario(backends=("torch",), quick=("torch",))
def sparse_gradients_of_a_module(setting: Setting) -> dict[str, Any]:
    import torch

    class Looking(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            table = torch.nn.Embedding(9, 4, sparse=True)
            torch.nn.init.constant_(table.weight, 0.5)
            self.table = table

        def call(self, inputs: Any) -> Any:
            return self.table(inputs)

    def build() -> Any:
        return keras.Sequential([keras.Input((3,), dtype="int32"), Looking(), layers.Flatten(), layers.Dense(1)])

    model = compiled(setting, build, loss="mse", optimizer=keras.optimizers.SGD(0.05))
    return fitted(model, labels(3 * 33, 9).reshape(33, 3), numbers())


@scenario(backends=("torch",), quick=("torch",))
def loader_of_bfloat16(setting: Setting) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.tensor(features()).to(torch.bfloat16), torch.tensor(numbers()))
    return fitted_on(compiled(setting, regressor, loss="mse"), DataLoader(data, batch_size=BATCH))


@scenario(backends=("jax",), quick=("jax",))
def prints_in_a_step_that_needs_the_other_ranks(setting: Setting) -> dict[str, Any]:
    """A mask does."""
    import jax

    class Printing(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.supports_masking = True

        def call(self, inputs: Any) -> Any:
            jax.debug.print("mean {mean}", mean=2 * ops.mean(inputs))
            return inputs

    def build() -> Any:
        inputs = keras.Input((3,), dtype="int32")
        return keras.Model(inputs, layers.Dense(1)(Printing()(layers.Embedding(9, 4, mask_zero=True)(inputs))))

    x = labels(3 * 33, 9).reshape(33, 3)
    return fitted(compiled(setting, build, loss="mse"), x, numbers(width=3)[..., None])


@scenario(plain=False, quick=("torch",))
def own_train_step_that_draws_numbers(setting: Setting) -> dict[str, Any]:
    """Replicas draw others, which is no difference of the program."""
    noise = (lambda: layers.Dense(4), lambda: layers.Dropout(0.5), layers.BatchNormalization, _Noise)
    return {"weights": _trained(setting, _dense(_stepping(), *noise))["weights"][0]}


class _Noise(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs + keras.random.normal(ops.shape(inputs), seed=self.seeds) if training else inputs


@scenario(backends=("tensorflow", "torch"), quick=("torch",))
def own_train_step_that_counts_in_attributes(setting: Setting) -> dict[str, Any]:
    """Applies every second time, the sum of two gradients: a step that is tried must leave no count behind."""
    steps = _stepping()

    class Accumulating(steps):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.steps = 0
            self.held: Any = None

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            loss, gradients = _gradients(lambda: ops.mean(ops.square(self(x) - y)), self.trainable_variables)
            self.steps += 1
            if self.steps % 2:
                self.held = list(gradients)
            else:
                self.optimizer.apply(
                    [a + b for a, b in zip(self.held, gradients, strict=True)], self.trainable_variables
                )
            return {"error": loss}

    model = compiled(setting, _dense(Accumulating), loss=None, run_eagerly=True)
    found = fitted(model, features()[:32], numbers()[:32], batch_size=8)
    return {**found, "steps": model.steps}


@scenario(
    backends=("tensorflow", "torch"),
    quick=("torch",),
    worlds=(2,),
    error=_refused("updates weights with gradients that are not merged"),
)
def own_train_step_without_a_number_at_first(setting: Setting) -> dict[str, Any]:
    """The second replica's part of the first samples gives no number; with other samples the difference shows."""

    class ByHand(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            chosen = ops.cast(x[:, :1] > 0.0, "float32")

            def loss_of() -> Any:
                return ops.sum(chosen * ops.square(self(x) - y)) / ops.sum(chosen)

            loss, gradients = _gradients(loss_of, self.trainable_variables)
            for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
                variable.assign(variable - 0.1 * gradient)
            return {"error": loss}

    x = features()
    x[:, 0] = -abs(x[:, 0])
    x[2:5, 0] *= -1  # of the chief's eight samples, of which the trial takes the first two again
    return fitted(compiled(setting, _dense(ByHand), loss=None), x, numbers())


@scenario(backends=("tensorflow", "torch"), quick=("torch",))
def own_train_step_that_builds_a_head(setting: Setting) -> dict[str, Any]:
    """Keras builds in the first step what only that step calls; a stray layer stays as it is."""

    class WithHead(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.stray = layers.Dense(4, "tanh"), layers.Dense(1), layers.Dense(2)
            self.optimizer_of_head = keras.optimizers.SGD(0.1)

        def call(self, inputs: Any) -> Any:
            return self.body(inputs)

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            self.head(self.body(x))
            body, head = self.body.trainable_variables, self.head.trainable_variables
            loss, gradients = _gradients(lambda: ops.mean(ops.square(self.head(self.body(x)) - y)), [*body, *head])
            self.optimizer.apply(gradients[:2], body)
            self.optimizer_of_head.apply(gradients[2:], head)
            return {"error": loss}

    return fitted(compiled(setting, WithHead, loss=None), y=numbers())


def _testing(log: Callable[[Any], dict[str, Any]]) -> type:
    """A model with a `test_step` that logs what it computes of the errors of a batch."""

    class Jax(keras.Model):
        def test_step(self, state: Any, data: Any) -> Any:
            trainable, others, metrics = state
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            prediction, others = self.stateless_call(trainable, others, x, training=False)
            return log(prediction - y), (trainable, others, metrics)

    class Other(keras.Model):
        def test_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            return log(self(x, training=False) - y)

    return Jax if keras.backend.backend() == "jax" else Other


def _evaluated(setting: Setting, log: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    model = compiled(setting, _dense(_testing(log)), loss="mse")
    evaluated = model.evaluate(features()[:BATCH], numbers()[:BATCH], batch_size=BATCH, return_dict=True, verbose=0)
    return {"evaluated": evaluated, **_validated(model)}


def _validated(model: Any, *weights: Any) -> dict[str, Any]:
    data = (features(BATCH, seed=1), numbers(BATCH, seed=1), *weights)
    return fitted(model, features(), numbers(), validation_data=data)


class WeighedByHand(keras.losses.Loss):
    """Without weights it is a mean, and with them a ratio of two sums."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        errors = ops.mean(ops.square(y_pred - y_true), axis=-1)
        if sample_weight is None:
            return ops.mean(errors)
        return ops.sum(errors * ops.reshape(sample_weight, (-1,))) / ops.sum(sample_weight)


@scenario(quick=ONE_BACKEND, error=_refused("The loss 'weighed' of"))
def own_loss_that_only_validation_data_weigh(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, _dense(keras.Model), loss=WeighedByHand(name="weighed"))
    return _validated(model, np.linspace(0.1, 3.0, BATCH).astype("float32"))


@scenario(quick=ONE_BACKEND, error=_refused("The loss 'weighed' of"))
def own_loss_that_only_a_validation_generator_weighs(setting: Setting) -> dict[str, Any]:
    """It is found out when the first validation begins, as a generator is not read before."""

    def batches() -> Iterator[Any]:
        yield features(BATCH, seed=1), numbers(BATCH, seed=1), np.linspace(0.1, 3.0, BATCH).astype("float32")

    model = compiled(setting, _dense(keras.Model), loss=WeighedByHand(name="weighed"))
    return fitted(model, features(), numbers(), validation_data=batches())


@scenario(quick=ONE_BACKEND, backends=("jax", "torch"))
def own_loss_of_generators_that_draw_numbers(setting: Setting) -> dict[str, Any]:
    """Tests before the first step read no batch before its time. (On TensorFlow, Keras itself reads ahead.)"""
    np.random.seed(3)

    def batches() -> Iterator[Any]:
        while True:
            x = np.random.normal(size=(8, FEATURES)).astype("float32")
            yield x, x.sum(axis=1, keepdims=True)

    model = compiled(setting, _dense(keras.Model), loss=WeighedByHand(name="weighed"))
    return fitted_on(model, batches(), steps_per_epoch=3, validation_data=batches(), validation_steps=2)


class SummedIfWeighed(keras.Model):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        errors = ops.mean(ops.square(y_pred - y), axis=-1)
        return ops.mean(errors) if sample_weight is None else ops.sum(errors * ops.reshape(sample_weight, (-1,)))


@scenario(quick=ONE_BACKEND, error=_refused("What compute_loss of SummedIfWeighed returns is a sum over the batch for"))
def own_compute_loss_that_sums_weighed_data(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, _dense(SummedIfWeighed), optimizer=keras.optimizers.SGD(0.005))
    return _validated(model, np.linspace(0.1, 3.0, BATCH).astype("float32"))


@scenario(quick=ONE_BACKEND, error=_refused("The loss 'weighed' of"))
def own_loss_that_only_a_later_fit_weighs(setting: Setting) -> dict[str, Any]:
    """Fits from generators, of which nothing is read ahead."""
    model = compiled(setting, _dense(keras.Model), loss=WeighedByHand(name="weighed"))
    batches = [(features(BATCH, seed=1), numbers(BATCH, seed=1)) for _ in range(2)]
    weight = np.linspace(0.1, 3.0, BATCH).astype("float32")
    first = fitted_on(model, (each for each in batches), epochs=1)
    return first | fitted_on(model, ((*each, weight) for each in batches), epochs=1)


class Weighing(keras.Model):
    def test_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        return {"error": WeighedByHand()(y, self(x), weight)}


@scenario(backends=("tensorflow", "torch"), quick=("torch",), error=_refused("its test_step logs 'error'"))
def own_test_step_that_only_validation_data_weigh(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, _dense(Weighing), loss="mse")
    return _validated(model, np.linspace(0.1, 3.0, BATCH).astype("float32"))


@scenario(quick=ONE_BACKEND)
def own_test_step_that_logs_a_mean(setting: Setting) -> dict[str, Any]:
    return _evaluated(setting, lambda error: {"square": ops.mean(ops.square(error)), "error": ops.mean(error)})


@scenario(quick=("torch",), error=_refused("its test_step logs 'root'"))
def own_test_step_that_logs_a_root(setting: Setting) -> dict[str, Any]:
    return _evaluated(setting, lambda error: {"root": ops.sqrt(ops.mean(ops.square(error)))})


@scenario(error=_refused("its test_step logs 'total'"))
def own_test_step_of_validation_data_that_logs_a_sum(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, _dense(_testing(lambda error: {"total": ops.sum(error)})), loss="mse")
    return _validated(model)


@scenario(quick=ONE_BACKEND, error=_refused("what its train_step does with them before"))
def own_train_step_that_clips_later(setting: Setting) -> dict[str, Any]:
    share = keras.Variable(0.0, trainable=False, name="share")

    def change(gradients: Any) -> Any:
        return [share * clipped + (1.0 - share) * g for g, clipped in zip(gradients, _clipped(gradients), strict=True)]

    def raise_share(epoch: int, logs: Any) -> None:
        share.assign(float(epoch))

    model = compiled(setting, _dense(_stepping(change)), loss="mse")
    return fitted(model, y=numbers(), callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=raise_share)])


class RunningScale(layers.Layer):
    """Divides by the mean size of what it has seen, which it keeps as a number."""

    size = 1.0

    def call(self, inputs: Any) -> Any:
        outputs = inputs / self.size
        self.size = 0.5 * self.size + 0.5 * float(ops.convert_to_numpy(ops.mean(ops.abs(inputs))))
        return outputs


@scenario(
    backends=("tensorflow", "torch"), quick=BACKENDS, error=_refused("what an earlier one has kept of its samples")
)
def layer_that_keeps_a_mean_in_python(setting: Setting) -> dict[str, Any]:
    return _trained(setting, _with(RunningScale), run_eagerly=True)


class LastFeatures(keras.Model):
    """Draws the predictions of a batch towards the mean of the batch before, from a queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue: list[Any] = []
        self.steps = 0
        self.last_loss: Any = None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        self.steps += 1
        loss = ops.mean(ops.square(y_pred - y)) / self.steps
        if self.queue:
            loss = loss + 0.1 * ops.mean(ops.square(y_pred - self.queue.pop()))
        if self.collects:
            self.queue.append(ops.mean(ops.stop_gradient(y_pred)))
        self.last_loss = loss
        return loss

    collects = True


@scenario(backends=("torch",), error=_refused("what an earlier one has kept of its samples"))
def model_that_keeps_a_queue(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, _dense(LastFeatures), loss=None), y=numbers())


@scenario(backends=("torch",), quick=("torch",))
def model_that_counts_and_remembers_in_python(setting: Setting) -> dict[str, Any]:
    """Steps are counted alike everywhere, and what no step uses may differ."""

    class Counting(LastFeatures):
        collects = False

    return fitted(compiled(setting, _dense(Counting), loss=None), y=numbers())


@scenario(backends=("torch",), worlds=(2,), quick=("torch",))
def own_train_step_that_adds_up_gradients(setting: Setting) -> dict[str, Any]:
    """Over two batches, of which all replicas have parts of one size."""

    class Model(keras.Model):
        steps = 0

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            loss = ops.mean(ops.square(self(x, training=True) - y))
            loss.backward()
            self.steps += 1
            if self.steps % 2 == 0:
                import torch

                with torch.no_grad():
                    self.optimizer.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)
                self.zero_grad()
            return {"error": loss}

    return fitted(compiled(setting, _dense(Model), loss=None), features(64), numbers(64), epochs=3)


def _stepping_with(log: Callable[[Any, Any, Any, Any], dict[str, Any]]) -> type:
    """A model whose `train_step` updates its weights, and then logs what a function makes of model, targets,
    predictions and loss."""

    class Model(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.error = keras.metrics.MeanAbsoluteError(name="error")

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            loss, gradients = _gradients(lambda: _mean_square(self(x, training=True), y), self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return log(self, y, self(x), loss)

    return Model


def _stepped(setting: Setting, log: Callable[[Any, Any, Any, Any], dict[str, Any]]) -> dict[str, Any]:
    return fitted(compiled(setting, _dense(_stepping_with(log)), loss=None), y=numbers())


EAGER_KINDS = ("tensorflow", "torch")
"""Where a step assigns; on JAX it is a function."""


@scenario(backends=EAGER_KINDS, quick=ONE_BACKEND, error=_refused("sets the learning rate"))
def own_train_step_that_sets_the_learning_rate(setting: Setting) -> dict[str, Any]:
    def log(model: Any, y: Any, y_pred: Any, loss: Any) -> dict[str, Any]:
        model.optimizer.learning_rate.assign(0.05 / (1.0 + loss))
        return {"squares": loss}

    return _stepped(setting, log)


@scenario(backends=EAGER_KINDS, quick=ONE_BACKEND)
def own_train_step_with_a_metric_named_loss(setting: Setting) -> dict[str, Any]:
    """As on keras.io, without the property `metrics`: Keras's own `loss`, which counts nothing, comes before it."""

    def log(model: Any, y: Any, y_pred: Any, loss: Any) -> dict[str, Any]:
        model.tracker.update_state(loss)
        return {"loss": model.tracker.result()}

    class Model(_stepping_with(log)):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.tracker = keras.metrics.Mean(name="loss")

    return fitted(compiled(setting, _dense(Model), loss=None), y=numbers())


@scenario(backends=EAGER_KINDS, quick=ONE_BACKEND)
def own_train_step_that_lowers_the_learning_rate(setting: Setting) -> dict[str, Any]:
    def log(model: Any, y: Any, y_pred: Any, loss: Any) -> dict[str, Any]:
        model.optimizer.learning_rate.assign(0.9 * model.optimizer.learning_rate)
        return {"squares": loss}

    return _stepped(setting, log)


@scenario(backends=EAGER_KINDS, quick=ONE_BACKEND, error=_refused("belongs to no layer and no metric of the model"))
def own_train_step_with_a_variable_of_no_layer(setting: Setting) -> dict[str, Any]:
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        running: Any = tf.Variable(1.0, name="running")
    else:
        running = keras.Variable(1.0, name="running")

    def log(model: Any, y: Any, y_pred: Any, loss: Any) -> dict[str, Any]:
        running.assign(0.5 * running + 0.5 * loss)
        return {"squares": loss}

    return _stepped(setting, log)


@scenario(backends=EAGER_KINDS, quick=ONE_BACKEND, error=_refused("belongs to no layer and no metric of the model"))
def own_train_step_with_a_metric_of_no_model(setting: Setting) -> dict[str, Any]:
    error = keras.metrics.MeanAbsoluteError(name="outside")

    def log(model: Any, y: Any, y_pred: Any, loss: Any) -> dict[str, Any]:
        error.update_state(y, y_pred)
        return {"absolute": error.result()}

    return _stepped(setting, log)


@scenario(quick=ONE_BACKEND)
def own_compute_loss_with_the_only_metric(setting: Setting) -> dict[str, Any]:
    """The example of `keras.Model.compute_loss`. Keras's step on TensorFlow still updates a tracker of its own."""

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.loss_tracker = keras.metrics.Mean(name="loss")

        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
            loss = ops.mean(ops.square(y_pred - y))
            self.loss_tracker.update_state(loss)
            return loss

        def reset_metrics(self) -> None:
            self.loss_tracker.reset_state()

        @property
        def metrics(self) -> list[Any]:
            return [self.loss_tracker]

    return fitted(compiled(setting, _dense(Model), loss=None), y=numbers())


@scenario(backends=EAGER_KINDS, quick=ONE_BACKEND)
def own_train_step_that_logs_a_number_by_the_name_of_a_metric(setting: Setting) -> dict[str, Any]:
    """Beside another name: Keras logs what the step returned, that of the last batch."""

    def log(model: Any, y: Any, y_pred: Any, loss: Any) -> dict[str, Any]:
        model.error.update_state(y, y_pred)
        return {"error": loss, "twice": 2.0 * loss}

    return _stepped(setting, log)


@scenario(backends=EAGER_KINDS, quick=ONE_BACKEND, error=_refused("resets the metric 'error'"))
def own_train_step_that_resets_a_metric(setting: Setting) -> dict[str, Any]:
    def log(model: Any, y: Any, y_pred: Any, loss: Any) -> dict[str, Any]:
        model.error.reset_state()
        model.error.update_state(y, y_pred)
        return {"of batch": model.error.result()}

    return _stepped(setting, log)


@scenario(backends=EAGER_KINDS, quick=ONE_BACKEND, error=_refused("reads the result of the metric 'error', and then"))
def own_train_step_that_logs_a_former_result(setting: Setting) -> dict[str, Any]:
    def log(model: Any, y: Any, y_pred: Any, loss: Any) -> dict[str, Any]:
        former = model.error.result()
        model.error.update_state(y, y_pred)
        return {"former": former}

    return _stepped(setting, log)


class _Outer(keras.Model):
    """Trains another model, and has no `call`."""

    def __init__(self, student: Any) -> None:
        super().__init__()
        self.student = student

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        weights = self.student.trainable_variables
        loss, gradients = _gradients(lambda: ops.mean(ops.square(self.student(x, training=True) - y)), weights)
        self.optimizer.apply(gradients, weights)
        self._compile_metrics.update_state(y, self.student(x))
        return {**{metric.name: metric.result() for metric in self.metrics}, "squares": loss}


@scenario(backends=("tensorflow",))
def own_train_step_that_builds_compiled_metrics(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, lambda: _Outer(_dense(keras.Model)()), loss=None, metrics=["mae"]), y=numbers())


class OfRows(keras.Model):
    """Is called with all features, and trained with numbers of rows, as models of graphs are."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = layers.Dense(4, "tanh"), layers.Dense(1)
        self.features = features()

    def call(self, inputs: Any) -> Any:
        values, scales = inputs
        return self.head(self.hidden(values) * scales)

    def train_step(self, data: Any) -> Any:
        rows, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        inputs = [ops.convert_to_tensor(self.features), ops.ones((1, 4))]

        def loss_of() -> Any:
            predictions = self(inputs)
            return self.compute_loss(y=y, y_pred=ops.take(predictions, rows, axis=0))

        self(inputs)
        loss, gradients = _gradients(loss_of, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"squares": loss}


@scenario(backends=("tensorflow",))
def own_train_step_that_calls_the_model_with_other_inputs(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, OfRows, loss="mse"), np.arange(33), numbers())


@scenario(backends=("tensorflow",))
def own_train_step_in_a_function_of_tensorflow(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = layers.Dense(1)
            self.steps = keras.Variable(0.0, trainable=False, name="steps")

        @tf.function(jit_compile=False)  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self.head(x) - y))
            weights = self.head.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            self.steps.assign_add(1.0)
            return {"squares": loss, "steps": self.steps + 0.0}

    return fitted(compiled(setting, Model, loss=None), y=numbers())


class Clipping(layers.Layer):
    """Counts up by samples above a threshold and down by others, and clips: for the first batch there is nothing to
    clip."""

    def build(self, shape: Any) -> None:
        self.share = self.add_weight(shape=(), initializer="zeros", trainable=False, name="share")

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs + self.share
        if training:
            above = ops.mean(ops.cast(inputs[:, 0] > 0, "float32"))
            self.share.assign(ops.clip(self.share + (above - 0.85) / 50, 0.0, 1.0))
        return outputs


@scenario(quick=ONE_BACKEND, error=_refused("clip it where it is used"))
def layer_that_clips_its_state(setting: Setting) -> dict[str, Any]:
    x = features()
    x[:16, 0] = abs(x[:16, 0])
    x[0, 1] = -3.0
    model = compiled(setting, _with(lambda: Clipping(name="clipping")), loss="mse")
    return fitted(model, x, numbers())


counted_globally = 0


@scenario(backends=("torch",), quick=("torch",))
def own_train_step_that_counts_in_a_global_variable(setting: Setting) -> dict[str, Any]:
    """The trial of the step leaves it unchanged."""
    global counted_globally
    counted_globally = 0

    class Model(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            global counted_globally
            counted_globally += 1
            return ops.mean(ops.square(y_pred - y)) / counted_globally

    found = fitted(compiled(setting, _dense(Model), loss=None), y=numbers())
    return {**found, "counted": counted_globally}


@scenario(backends=("torch",), quick=("torch",))
def own_train_step_that_reads_other_data(setting: Setting) -> dict[str, Any]:
    """From an iterator, of which a trial of the step would lose items."""
    others = iter(range(1, 100))

    class Model(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            return ops.mean(ops.square(y_pred - y)) / next(others)

    return fitted(compiled(setting, _dense(Model), loss=None), y=numbers())


@scenario(backends=EAGER_KINDS, quick=ONE_BACKEND)
def own_train_step_that_adds_to_a_metric_after_the_logs(setting: Setting) -> dict[str, Any]:
    """Keras takes all results again at the end, as the logs have the names of all metrics."""

    class Model(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.error = keras.metrics.MeanAbsoluteError(name="error")

        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            self.error.update_state(y, self(x))
            return logs

    return fitted(compiled(setting, _dense(Model), loss="mse"), y=numbers())


def _with_step_that_is_set(change: Any = None) -> Callable[[], Any]:
    """A model of Keras's own class that takes the steps of another one."""

    def build() -> Any:
        model = _dense(keras.Model)()
        model.train_step = types.MethodType(_stepping(change).train_step, model)
        return model

    return build


@scenario(quick=BACKENDS)
def train_step_that_is_set(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, _with_step_that_is_set(), loss="mae"), y=numbers())


@scenario(error=_refused("what its train_step does with them before"))
def train_step_that_is_set_and_clips(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, _with_step_that_is_set(_clipped), loss="mae"), y=numbers())


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "compute_loss")))
def compute_loss_that_is_set(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, _dense(keras.Model), loss="mse")
    compute = model.compute_loss
    model.compute_loss = lambda *args, **kwargs: ops.sqrt(compute(*args, **kwargs))
    return fitted(model, y=numbers())
