"""Attributes that a program has set, in a copy of what has them."""

from __future__ import annotations

import enum
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.copies.object_attributes import layer_attributes, restore_layer_attributes


class Mode(enum.Enum):
    PLAIN = 1
    OTHER = 2


class Net(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(1), keras.layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean()
        self.factors = {"a": [1.0, (2, None)], "b": {"x", "y"}}
        self.table = np.zeros(3)
        self.function: Callable[..., Any] = keras.ops.tanh
        self.partial = functools.partial(self.function, 1)
        self.method = self.call
        self.options = SimpleNamespace(rate=0.5, layer=self.first)
        self.mode = Mode.PLAIN
        self.folder = Path("a")
        self._hidden = 1

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def restored(model: Net) -> Net:
    """A copy in which the attributes are that have travelled."""
    copy = Net()
    copy(np.ones((1, 2)))
    restore_layer_attributes(copy, pickle.loads(pickle.dumps(layer_attributes(model))))
    return copy


def built() -> Net:
    model = Net()
    model(np.ones((1, 2)))
    return model


def test_plain_values_travel_and_all_else_may_be_there() -> None:
    model = built()
    model.compile("adam", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    model.factors["a"].append(3)  # type: ignore[attr-defined]
    model.options.rate, model.folder, model._hidden = 0.25, Path("b"), 2
    model.first.use_bias = 7  # no one else's attribute of a layer of Keras's
    model.later = np.float32(3)
    copy = restored(model)
    assert copy.factors == {"a": [1.0, (2, None), 3], "b": {"x", "y"}}
    assert (copy.options.rate, copy.folder, copy._hidden, copy.first.use_bias) == (0.25, Path("b"), 2, 7)
    assert copy.later == 3
    assert copy.options.layer is copy.first
    assert not copy.compiled
    pairs = zip(layer_attributes(model), layer_attributes(copy), strict=True)
    assert all(one.attributes == other.attributes for one, other in pairs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "function", keras.ops.sin), "'function' of 'net.*the function sin"),
        (lambda model: setattr(model, "function", lambda x: x), "'function' of 'net.*the function <lambda>"),
        (lambda model: setattr(model, "partial", functools.partial(keras.ops.sin, 1)), "'partial' of 'net"),
        (lambda model: setattr(model, "table", np.ones(3)), "'table' of 'net.*an array of shape"),
        (lambda model: setattr(model, "mode", Mode.OTHER), "'mode' of 'net.*Mode.OTHER"),
        (lambda model: setattr(model.options, "layer", model.second), "'layer' of 'net.*options' is a Dense layer"),
        (lambda model: setattr(model, "added", SimpleNamespace(rate=1)), "'added' of 'net"),
        (lambda model: setattr(model, "first", model.second), "'first' of 'net.*is a Dense layer"),
    ],
)
def test_what_cannot_travel_is_refused_where_it_differs(change: Callable[[Net], Any], message: str) -> None:
    model = built()
    change(model)
    with pytest.raises(UnsupportedError, match=message):
        restored(model)


def test_layers_that_a_copy_lacks_are_refused() -> None:
    model = Net()
    model.third = keras.layers.Dropout(0.5)
    with pytest.raises(UnsupportedError, match="has the Dropout layer 'dropout"):
        restored(model)
