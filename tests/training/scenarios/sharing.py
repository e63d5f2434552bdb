"""Replicas that each update a part of the weights (`phalanx.training.steps.sharded_optimizer`): when they do, and what
is then seen of it. That the numbers are those of one process is what nearly all scenarios show, whose models are
trained so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from keras import layers, optimizers

from phalanx.training.callback_list import ReplicaProgbar
from phalanx.training.replica_model import ReplicaModel
from tests.training.scenarios.common import BATCH, classifier, compiled, features, fitted, labels, observed
from tests.training.scenarios.registry import BACKENDS, Setting, add, scenario


@contextmanager
def _steppers() -> Iterator[list[bool]]:
    """For each `fit` inside, whether the update was shared."""
    found: list[bool] = []
    original = ReplicaModel.sharded_stepper

    def sharded_stepper(self: Any, *arguments: Any) -> Any:
        stepper = original(self, *arguments)
        found.append(stepper is not None)
        return stepper

    with mock.patch.object(ReplicaModel, "sharded_stepper", sharded_stepper):
        yield found


def _check(setting: Setting, found: list[bool], expected: list[bool]) -> None:
    assert setting.alone or found == expected, (found, expected)


def _state(model: Any) -> dict[str, Any]:
    return {"optimizer": [keras.ops.convert_to_numpy(variable.value) for variable in model.optimizer.variables]}


class _Watching(keras.callbacks.Callback):
    """Something of the program's own at single batches."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


def _normalised() -> Any:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(3, "softmax")]
    )


def _constrained() -> Any:
    return classifier(kernel_constraint=keras.constraints.MaxNorm(1.0))


CASES: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    # Whether it is shared, arguments of `compiled`, arguments of `fit`.
    "adam": (True, {"optimizer": "adam"}, {}),
    "momentum": (True, {"optimizer": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True)}, {}),
    "adagrad": (True, {"optimizer": lambda: optimizers.Adagrad(0.1)}, {}),
    "ftrl": (True, {"optimizer": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01)}, {}),
    "nadam": (True, {"optimizer": lambda: optimizers.Nadam(0.05)}, {}),
    "adamw": (True, {"optimizer": lambda: optimizers.AdamW(0.05, weight_decay=0.1)}, {}),
    "clipvalue": (True, {"optimizer": lambda: optimizers.SGD(0.2, clipvalue=0.01)}, {}),
    "schedule": (
        True,
        {"optimizer": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))},
        {},
    ),
    "accuracy": (True, {"optimizer": "adam", "metrics": ["accuracy", "sparse_categorical_crossentropy"]}, {}),
    "global_clipnorm": (False, {"optimizer": lambda: optimizers.Adam(global_clipnorm=0.05)}, {}),
    "ema": (False, {"optimizer": lambda: optimizers.Adam(use_ema=True)}, {}),
    "accumulation": (False, {"optimizer": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2)}, {}),
    "normalisation": (False, {"build": _normalised}, {}),
    "constraint": (False, {"build": _constrained}, {}),
    "own_callback": (False, {}, {"callbacks": lambda: [_Watching()]}),
}
SHARING = ("jax", "torch")
QUICK = ("adam", "normalisation")


def _case(shared: bool, arguments: dict[str, Any], of_fit: dict[str, Any]) -> Callable[[Setting], dict[str, Any]]:
    def run(setting: Setting) -> dict[str, Any]:
        made = {name: make() if callable(make) and name != "build" else make for name, make in arguments.items()}
        model = compiled(setting, **made)
        with _steppers() as found:
            seen = fitted(model, **{name: make() for name, make in of_fit.items()}) | _state(model) | observed(model)
        _check(setting, found, [shared])
        return seen

    return run


for _name, (_shared, _arguments, _of_fit) in CASES.items():
    _plain = _name != "normalisation"  # each replica normalises its own part
    case = _case(_shared, _arguments, _of_fit)
    add(f"sharing_{_name}", case, backends=SHARING, plain=_plain, quick=SHARING if _name in QUICK else ())


@scenario(backends=SHARING, quick=BACKENDS)
def sharing_again(setting: Setting) -> dict[str, Any]:
    """Between calls of `fit` and epochs the program changes what it likes, and takes single batches."""
    model = compiled(setting, optimizer=optimizers.Adam(0.05))
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    set_bias = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.layers[1].bias.assign(np.ones(3, "float32"))
    )
    with _steppers() as found:
        first = fitted(model, callbacks=[halve, set_bias])
        batch = model.train_on_batch(features(BATCH), labels(BATCH))
        model.set_weights([weight * 0.5 for weight in model.get_weights()])
        model.optimizer.learning_rate = 0.1
        second = fitted(model)
    _check(setting, found, [True, True])
    return {"first": first, "batch": batch, "second": second} | _state(model)


@scenario(backends=SHARING)
def sharing_layers_frozen_between(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=optimizers.Adam(0.05))
    with _steppers() as found:
        first = fitted(model)
        model.layers[0].trainable = False
        with setting.scope():
            model.compile(optimizers.Adam(0.05), "sparse_categorical_crossentropy")
        second = fitted(model)
    _check(setting, found, [True, True])
    return {"first": first, "second": second} | _state(model)


@scenario(plain=False, backends=SHARING, quick=BACKENDS)
def sharing_only_where_all_ranks_may(setting: Setting) -> dict[str, Any]:
    """A callback of one rank's alone looks between batches."""
    model = compiled(setting, optimizer="adam")
    with _steppers() as found:
        seen = fitted(model, callbacks=[_Watching()] if setting.rank == 1 else [])
    _check(setting, found, [False])
    return seen


@scenario(plain=False, backends=SHARING, quick=BACKENDS)
def sharing_not_without_memory(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer="adam")
    with _steppers() as found, mock.patch("phalanx.training.steps.sharded_optimizer.shared_block", return_value=None):
        seen = fitted(model)
    _check(setting, found, [False])
    return seen


@scenario(backends=SHARING, quick=BACKENDS)
def sharing_shows_what_all_have_counted(setting: Setting) -> dict[str, Any]:
    """What the bar shows of each batch is what all replicas have counted until then."""
    shown: list[dict[str, float]] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: shown.append({name: float(value) for name, value in logs.items()})
    )
    model = compiled(setting, optimizer="adam", metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])
    if setting.alone:
        return fitted(model, callbacks=[note]) | {"shown": shown}

    class Bar(ReplicaProgbar):
        on_train_batch_end = staticmethod(note.on_train_batch_end)

    with _steppers() as found, mock.patch("phalanx.training.callback_list.ReplicaProgbar", Bar):
        seen = fitted(model, verbose=1)
    _check(setting, found, [True])
    chiefs, *others = map(json.loads, setting.gather(json.dumps(shown).encode()))
    assert not any(others)
    return seen | {"shown": chiefs}


@scenario(plain=False, backends=SHARING, quick=BACKENDS)
def sharing_broken_off(setting: Setting) -> dict[str, Any]:
    """An error in the middle of an epoch leaves the weights of the last step, and an optimizer of the epoch before."""

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
    with _steppers() as found:
        with pytest.raises(OSError, match="the disk is gone"):
            model.fit(Broken(), shuffle=False, verbose=0)
        broken = False
        twin.fit(Broken(), shuffle=False, steps_per_epoch=3, verbose=0)
    _check(setting, found, [True, True])
    for own, others in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(own, others, rtol=1e-5, atol=1e-7)
    return {"iterations": int(model.optimizer.iterations), "weights": model.get_weights()}


class _Branching(keras.Model):
    """Has a layer that some batches do not use, and one that none uses."""

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


@scenario(backends=("torch",), quick=BACKENDS)
def sharing_ends_where_gradients_are_missing(setting: Setting) -> dict[str, Any]:
    """PyTorch gives none where a loss does not depend on a variable, which is then left alone with its moments."""
    model = compiled(setting, _Branching, optimizer=optimizers.AdamW(0.05, weight_decay=0.1), metrics=["accuracy"])
    model.build((None, 6))
    x = features()
    x[:, 0] = np.where(np.arange(len(x)) // BATCH == 1, 1, -1)  # whether the batch uses the layer
    with _steppers() as found:
        seen = fitted(model, x) | {"again": fitted(model, x)}
    _check(setting, found, [True, False])
    return seen | _state(model)


@scenario(backends=("torch",), quick=BACKENDS)
def sharing_ends_in_the_middle(setting: Setting) -> dict[str, Any]:
    """The first batches use all that the optimizer knows."""
    model = compiled(setting, _Branching, optimizer=optimizers.Adam(0.05), metrics=["accuracy"])
    model.build((None, 6))
    model.unused.trainable = False
    x = features(80)
    x[:, 0] = np.where(np.arange(len(x)) // BATCH < 3, 1, -1)
    with _steppers() as found:
        seen = fitted(model, x, labels(80))
    _check(setting, found, [True])
    return seen | _state(model)


@scenario(backends=("jax",))
def sharing_not_what_is_not_compiled(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer="adam", run_eagerly=True)
    with _steppers() as found:
        seen = fitted(model)
    _check(setting, found, [False])
    return seen
