"""What is trained with fewer bytes, and what must come of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import phalanx
from phalanx.data import local_range
from tests.support.seeds import set_random_seed
from tests.training.scenarios.common import (
    BATCH,
    FEATURES,
    SAMPLES,
    compiled,
    features,
    fitted,
    labels,
    numbers,
    observed,
)
from tests.training.scenarios.precision import _policy
from tests.training.scenarios.registry import BACKENDS, ONE_BACKEND, Setting, Table
from tests.training.scenarios.steps import _gradients

SCENARIOS = Table()
scenario = SCENARIOS.scenario

REPLICAS = 2
"""In the re-computations, which one process makes."""
EVERY = 2


def _with(setting: Setting, make: Any, *arguments: Any, **options: Any) -> Setting:
    """The same setting, with another strategy of the same job."""
    return (
        setting
        if setting.alone
        else Setting(make(*arguments, **options), setting.folder, setting.shared, setting.backend)
    )


def _compressed(setting: Setting, compression: Any) -> Setting:
    return _with(setting, phalanx.MultiWorkerMirroredStrategy, compression=compression)


def _wide() -> Any:
    """With a matrix that is large enough to be compressed, and layer state."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


# Compressed gradients.


@scenario(tolerance=2e-4, quick=ONE_BACKEND)
def top_k_of_all_is_exact(setting: Setting) -> dict[str, Any]:
    """With every value sent, the way through a codec and the error feedback changes nothing: shares, a last batch that
    is empty on all ranks but one, clipping by the norm of all merged gradients."""
    setting = _compressed(setting, phalanx.compression.TopK(1.0, values=None))
    model = compiled(setting, lambda: _wide_without_state(), optimizer=keras.optimizers.SGD(0.2, global_clipnorm=0.3))
    return fitted(model) | observed(model)


def _wide_without_state() -> Any:
    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(64), layers.Dense(64), layers.Dense(3, "softmax")])


def _near(compression: str, tolerance: float) -> None:
    def run(setting: Setting) -> dict[str, Any]:
        setting = _compressed(setting, compression)
        found = fitted(compiled(setting, _wide_without_state), epochs=4)
        return {"loss": found["history"]["loss"]} | {"own_bytes": 0 if setting.alone else setting.strategy.bytes_sent}

    SCENARIOS.add(f"near_{compression}", run, tolerance=tolerance, quick=BACKENDS if compression == "int8" else ())


for _name, _tolerance in {"float16": 2e-3, "bfloat16": 1e-2, "int8": 2e-2, "top_k": 0.3, "power_sgd": 0.2}.items():
    _near(_name, _tolerance)


@scenario(plain=False, quick=ONE_BACKEND)
def compressed_alike_on_all_ranks(setting: Setting) -> dict[str, Any]:
    """All ranks have the same bits after training with each compression, and fewer bytes were sent than without."""
    found: dict[str, Any] = {}
    sent = {}
    for name in (None, "float16", "bfloat16", "int8", "int6", "int4", "top_k", "power_sgd"):
        set_random_seed(1)
        own = _compressed(setting, name)
        model = compiled(own, _wide, optimizer=keras.optimizers.Adam(0.01))
        before = own.strategy.bytes_sent
        found[str(name)] = fitted(model, epochs=1)
        sent[name] = own.strategy.bytes_sent - before
        # Neither metrics nor layer state may be touched: what the ranks report is what each computes from the weights.
        assert all(np.isfinite(array).all() for array in found[str(name)]["weights"]), name
    assert all(sent[name] < sent[None] for name in sent if name), sent
    return found


@scenario(
    backends=("tensorflow",),
    plain=False,
    error={"tensorflow": ("UnsupportedError", "is a BatchNormalization(synchronized=True)")},
)
def batch_normalization_over_replicas_that_train_alone(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs, normalization = keras.Input((FEATURES,)), keras.layers.BatchNormalization(synchronized=True)
        return keras.Sequential([inputs, normalization, keras.layers.Dense(3, activation="softmax")])

    return fitted(compiled(_with(setting, phalanx.LocalSGDStrategy, 2), build))


@scenario(tolerance=1e-4)
def compressed_with_own_codec(setting: Setting) -> dict[str, Any]:
    """A user's own compression, here one that loses nothing."""

    class Whole(phalanx.compression.Codec):
        def encode(self, array: Any) -> Sequence[Any]:
            return [array]

        def decode(self, parts: Sequence[Any], size: int) -> Any:
            return parts[0]

    return fitted(compiled(_compressed(setting, Whole()), _wide_without_state))


class Twins(keras.Model):
    """Two parts of the same shapes, each with an optimizer of its own; nothing depends on the second one's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)]) for _ in range(2))
        self.other_optimizer = keras.optimizers.SGD(0.1)

    def call(self, x: Any) -> Any:
        return self.one(x) + 0.0 * self.other(x)

    def train_step(self, *arguments: Any) -> Any:
        *state, data = arguments
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        if state:
            return self._stateless_step(*state[0], x)
        for part, optimizer in ((self.one, self.optimizer), (self.other, self.other_optimizer)):
            loss, gradients = _gradients(lambda: keras.ops.mean(self(x) ** 2), part.trainable_variables)
            optimizer.apply(gradients, part.trainable_variables)
        return {"own_loss": loss}

    def _stateless_step(self, trainable: Any, others: Any, optimizer: Any, metrics: Any, x: Any) -> Any:
        import jax

        def loss_of(one: Any, other: Any) -> Any:
            outputs = [part.stateless_call(own, [], x)[0] for part, own in ((self.one, one), (self.other, other))]
            return keras.ops.mean((outputs[0] + 0.0 * outputs[1]) ** 2)

        one, other = trainable[:2], trainable[2:]
        loss, gradients = jax.value_and_grad(loss_of)(one, other)
        one, optimizer = self.optimizer.stateless_apply(optimizer, gradients, one)
        gradients = jax.grad(lambda part: loss_of(one, part))(other)
        other, others = self.other_optimizer.stateless_apply(others, gradients, other)
        return {"own_loss": loss}, ([*one, *other], others, optimizer, metrics)


@scenario(quick=ONE_BACKEND)
def compressed_for_two_optimizers(setting: Setting) -> dict[str, Any]:
    """What is kept of one optimizer's gradients is not added to those of another whose weights have the same shapes."""
    setting = _compressed(setting, phalanx.compression.TopK(0.1, values=None))
    with setting.scope():
        model = Twins()
        model.compile(keras.optimizers.SGD(0.1))
        for part, optimizer in ((model.one, model.optimizer), (model.other, model.other_optimizer)):
            optimizer.build(part.trainable_variables)
        model.state = list(model.other_optimizer.variables)  # for Keras on JAX
    before = model.other.get_weights()
    x = np.random.default_rng(0).standard_normal((32, 64)).astype("float32")
    history = model.fit(x, np.zeros(32), batch_size=8, epochs=2, shuffle=False, verbose=0).history
    changes = [np.abs(a - b).max() for a, b in zip(model.other.get_weights(), before, strict=True)]
    return {"own_history": history, "changes": changes}


# Gradients that the optimizer accumulates.


@scenario(tolerance=2e-4, quick=BACKENDS)
def accumulated(setting: Setting) -> dict[str, Any]:
    """6 steps, updates after 4: at the end of each epoch the optimizer holds what has been accumulated."""
    model = compiled(setting, optimizer=keras.optimizers.SGD(0.2, gradient_accumulation_steps=4))
    found = fitted(model)
    return found | {"optimizer": [keras.ops.convert_to_numpy(v.value) for v in model.optimizer.variables]}


@scenario(tolerance=2e-4)
def accumulated_compressed_and_scaled(setting: Setting) -> dict[str, Any]:
    setting = _compressed(setting, phalanx.compression.TopK(1.0, values=None))
    inner = keras.optimizers.SGD(0.2, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=3)
    return fitted(compiled(setting, _wide_without_state, optimizer=optimizer))


@scenario(plain=False, quick=ONE_BACKEND)
def accumulating_meets_once_per_update(setting: Setting) -> dict[str, Any]:
    """8 more steps of an epoch are 8 / k more collectives, in `fit` with updates after k steps."""
    more = {}
    for k in (1, 2, 4):
        optimizer = keras.optimizers.SGD(0.2, gradient_accumulation_steps=k if k > 1 else None)
        model = compiled(setting, optimizer=optimizer)
        model.fit(features(BATCH), labels(BATCH), batch_size=BATCH, verbose=0)  # all is built
        used = []
        for samples in (8 * BATCH, 16 * BATCH):
            before = setting.strategy._replica.communicator.statistics.collectives
            model.fit(features(samples), labels(samples), batch_size=BATCH, shuffle=False, verbose=0)
            used.append(setting.strategy._replica.communicator.statistics.collectives - before)
        more[k] = used[1] - used[0]
    assert more == {1: 8, 2: 4, 4: 2}, more
    return {"more": list(more.values())}


# Replicas that come together now and then.


@scenario(tolerance=2e-4)
def local_sgd_every_step_is_synchronous(setting: Setting) -> dict[str, Any]:
    model = compiled(_with(setting, phalanx.LocalSGDStrategy, 1))
    return fitted(model) | observed(model)


class Taught(keras.Model):
    """A teacher, frozen, is the moving average of what is trained, and is predicted as well."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = keras.layers.Dense(1), keras.layers.Dense(1, trainable=False)

    def build(self, shape: Any) -> None:
        self.student.build(shape)
        self.teacher.build(shape)
        self.teacher.set_weights(self.student.get_weights())

    def call(self, inputs: Any) -> Any:
        return self.student(inputs)

    def train_step(self, data: Any) -> Any:
        x, y = data

        def loss() -> Any:
            near = keras.ops.mean(keras.ops.square(self(x) - keras.ops.stop_gradient(self.teacher(x))))
            return near + keras.ops.mean(keras.ops.square(self(x) - y))

        value, gradients = _gradients(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for slow, fast in zip(self.teacher.variables, self.student.variables, strict=True):
            slow.assign(0.8 * slow + 0.2 * fast)
        return {"loss": value}


@scenario(tolerance=2e-4, backends=("torch", "tensorflow"), quick=ONE_BACKEND)
def local_sgd_merges_a_teacher(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        model = Taught()
        model.build((None, FEATURES))
        return model

    model = compiled(_with(setting, phalanx.LocalSGDStrategy, 1), build, loss=None)
    model.fit(features(32), numbers(32), batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    return {"weights": model.get_weights()}


@scenario(tolerance=2e-4)
def local_sgd_counts_steps_without_samples(setting: Setting) -> dict[str, Any]:
    """The last batch has one sample, of which only one replica has a part; the learning rate falls on all."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.3, 2, 0.5)
    model = compiled(_with(setting, phalanx.LocalSGDStrategy, 1), optimizer=keras.optimizers.SGD(schedule))
    return fitted(model, epochs=3)


@scenario(plain=False)
def local_sgd_accumulates_between_single_batches(setting: Setting) -> dict[str, Any]:
    optimizer = keras.optimizers.SGD(0.2, gradient_accumulation_steps=2)
    model = compiled(_with(setting, phalanx.LocalSGDStrategy, 2), optimizer=optimizer)
    found = fitted(model)
    model.train_on_batch(features(8), labels(8))
    return {"first": found, "second": fitted(model)}


@scenario(plain=False)
def averages_of_weights_are_alike_at_the_end_of_an_epoch(setting: Setting) -> dict[str, Any]:
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(self.model.get_weights())

    optimizer = keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.5)
    model = compiled(_with(setting, phalanx.LocalSGDStrategy, 2), optimizer=optimizer)
    fitted(model, epochs=2, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True), Look()])
    return {"seen": seen}


def _recomputed(make: Any, outer: Any, overlap: bool = False) -> dict[str, Any]:
    """Two replicas with Adam and batch normalisation in one process: three steps an epoch, exchanges after two."""
    models = []
    for _ in range(REPLICAS):
        set_random_seed(1)
        models.append(make())
    x, y = features(), labels()
    anchor = [np.array(w) for w in models[0].get_weights()]
    trainable = [any(w is v for v in models[0].trainable_weights) for w in models[0].weights]
    velocity = [np.zeros_like(w) for w in anchor]
    start = [[np.array(w) for w in m.get_weights()] for m in models]
    counts, underway, losses = [0] * REPLICAS, None, []

    def stepped(mean: Any) -> None:
        for i, progress in enumerate(mean):
            if not trainable[i] or outer is None:
                anchor[i] = anchor[i] - progress
                continue
            rate, momentum = outer
            velocity[i] = momentum * velocity[i] - rate * progress
            anchor[i] = anchor[i] + momentum * velocity[i] - rate * progress

    def exchange(last: bool) -> None:
        nonlocal underway, counts
        progress = [
            [s - w for s, w in zip(begun, model.get_weights(), strict=True)]
            for begun, model in zip(start, models, strict=True)
        ]
        mean = [sum(n / sum(counts) * p[i] for n, p in zip(counts, progress, strict=True)) for i in range(len(anchor))]
        former, underway = underway, None
        if former is not None:
            stepped(former)
        if overlap and not last:
            underway = mean
            for r, model in enumerate(models):
                if former is not None:
                    model.set_weights([a - p for a, p in zip(anchor, progress[r], strict=True)])
                start[r] = [np.array(w) for w in model.get_weights()]
        else:
            stepped(mean)
            for r, model in enumerate(models):
                model.set_weights(anchor)
                start[r] = [np.array(w) for w in anchor]
        counts = [0] * REPLICAS

    for _ in range(2):
        total, steps = 0.0, 0
        for first in range(0, SAMPLES, BATCH):
            size = min(BATCH, SAMPLES - first)
            for r, model in enumerate(models):
                low, high = local_range(size, r, REPLICAS)
                if high > low:
                    part = slice(first + low, first + high)
                    total += (high - low) * float(model.train_on_batch(x[part], y[part]))
                    counts[r] += high - low
            steps += 1
            if steps % EVERY == 0:
                exchange(last=False)
        if steps % EVERY or underway is not None:
            exchange(last=True)
        losses.append(total / SAMPLES)
    return {"history": {"loss": losses}, "weights": [np.array(w) for w in models[0].get_weights()]}


def _local(name: str, make_strategy: Any, outer: Any, *, overlap: bool = False) -> None:
    def run(setting: Setting) -> dict[str, Any]:
        def make() -> Any:
            model = _wide()
            model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
            return model

        if setting.alone:
            return _recomputed(make, outer, overlap)
        strategy = make_strategy(overlap)
        with strategy.scope():
            model = make()
        found = fitted(model)
        # What the ranks' optimizers have come to is the same again.
        state = [keras.ops.convert_to_numpy(v.value) for v in model.optimizer.variables]
        payload = b"".join(np.ascontiguousarray(array).tobytes() for array in state)
        assert len(set(setting.gather(payload))) == 1
        return found

    quick = {"local_sgd_recomputed": BACKENDS, "diloco_overlapped_recomputed": ONE_BACKEND}.get(name, ())
    SCENARIOS.add(name, run, tolerance=2e-4, worlds=(REPLICAS,), quick=quick)


_local("local_sgd_recomputed", lambda overlap: phalanx.LocalSGDStrategy(EVERY, overlap=overlap), None)
_local("diloco_recomputed", lambda overlap: phalanx.DiLoCoStrategy(EVERY, overlap=overlap), (0.7, 0.9))
_local("diloco_overlapped_recomputed", lambda o: phalanx.DiLoCoStrategy(EVERY, overlap=o), (0.7, 0.9), overlap=True)


@scenario(plain=False)
def diloco_compressed(setting: Setting) -> dict[str, Any]:
    """Ranks agree after exchanges with each compression, at the end of each epoch, and evaluate one model."""
    found: dict[str, Any] = {}
    for name in ("int8", "power_sgd", "top_k", "float16"):
        set_random_seed(1)
        own = _with(setting, phalanx.DiLoCoStrategy, EVERY, compression=name)
        model = compiled(own, _wide, optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])
        found[name] = fitted(model, validation_data=(features(), labels())) | observed(model)
        after, own_metrics = found[name]["evaluate"], found[name]["history"]
        assert abs(after["loss"] - own_metrics["val_loss"][-1]) < 1e-5, "validation saw the common weights"
    return found


@scenario(plain=False, quick=ONE_BACKEND)
def diloco_sends_little(setting: Setting) -> dict[str, Any]:
    """Between exchanges nothing is sent: 8 more steps with exchanges after 4 are 2 more exchanges."""
    used = []
    for samples in (8 * BATCH, 16 * BATCH):
        own = _with(setting, phalanx.DiLoCoStrategy, 4)
        model = compiled(own)
        communicator = own.strategy._replica.communicator
        before = communicator.statistics.collectives
        model.fit(features(samples), labels(samples), batch_size=BATCH, shuffle=False, verbose=0)
        used.append(communicator.statistics.collectives - before)
    assert used[1] - used[0] == 2 * 2, used  # each tells the samples, and merges
    return {"used": used}


@scenario(plain=False, quick=ONE_BACKEND)
def streams_of_unequal_length(setting: Setting) -> dict[str, Any]:
    """Rank 0 has more batches than the others, whose streams end early: all go through, and agree."""
    found: dict[str, Any] = {}
    makers = {
        "int8": lambda: phalanx.MultiWorkerMirroredStrategy(compression="int8"),
        "local_sgd": lambda: phalanx.LocalSGDStrategy(EVERY),
        "diloco": lambda: phalanx.DiLoCoStrategy(EVERY, compression="power_sgd", overlap=True),
    }
    for name, make in makers.items():
        set_random_seed(1)
        strategy = make()
        with strategy.scope():
            model = _wide()
            model.compile(optimizer=keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy")
        batches = 5 if strategy.rank == 0 else 2
        data = strategy.distribute_datasets_from_function(lambda _, n=batches: _Batches(n))
        history = model.fit(data, epochs=2, verbose=0).history
        found[name] = {"history": history, "weights": model.get_weights()}
    return found


@scenario(tolerance=2e-4, quick=ONE_BACKEND)
def ranks_without_data_do_not_count(setting: Setting) -> dict[str, Any]:
    """Global batches of one sample: the other ranks never have any, and rank 0 trains as if it were alone."""
    found: dict[str, Any] = {}
    for name, setting_of in {
        "local_sgd": lambda: _with(setting, phalanx.LocalSGDStrategy, EVERY),
        "top_k": lambda: _compressed(setting, phalanx.compression.TopK(1.0, values=None)),
    }.items():
        set_random_seed(1)
        optimizer = keras.optimizers.SGD(0.2, momentum=0.5)
        model = compiled(setting_of(), _wide_without_state, optimizer=optimizer)
        found[name] = fitted(model, features(5), labels(5), batch_size=1)
    return found


class _Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return features(8, seed=index), labels(8, seed=index)


# Loss scaling.


def _overflow(compression: str | None) -> None:
    def run(setting: Setting) -> dict[str, Any]:
        """One sample of the last rank overflows in 16 bits: the step is left out everywhere, and the scale halved."""
        setting = _compressed(setting, compression)
        x, y = features(4 * BATCH), labels(4 * BATCH)
        x[2 * BATCH - 1] = 3e38  # the last of the second batch
        with _policy("mixed_float16"):
            inner = keras.optimizers.SGD(0.05)
            optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=256.0, dynamic_growth_steps=100)
            model = compiled(setting, _wide_without_state, optimizer=optimizer)
            model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        scaled = model.optimizer
        assert all(np.isfinite(w).all() for w in model.get_weights())
        return {
            "weights": model.get_weights(),
            "scale": float(keras.ops.convert_to_numpy(scaled.dynamic_scale.value)),
            "updates": int(keras.ops.convert_to_numpy(scaled.inner_optimizer.iterations.value)),
        }

    SCENARIOS.add(
        f"overflow_on_one_rank_{compression}", run, tolerance=5e-2, quick=ONE_BACKEND if compression == "int8" else ()
    )


for _compression in (None, "int8", "power_sgd"):
    _overflow(_compression)
