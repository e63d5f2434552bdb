"""Reduction of Keras objects that are sent to other processes of the job by value."""

from __future__ import annotations

import copyreg
from typing import Any

import keras

from phalanx.engines.tensors import Tensors
from phalanx.keras_compat.callback_bases import OnChief
from phalanx.keras_compat.copies import model_copies
from phalanx.keras_compat.copies.object_attributes import plain_attributes
from phalanx.runtime.pickling import Reduce
from phalanx.training.chief_callbacks import runs_on_chief

A_CALL_TAKES = "Pass arrays, a keras.utils.PyDataset, a DataLoader or a tf.data.Dataset rather than a running generator"
"""Start of the advice if an argument cannot be sent."""


def by_value(tensors: Tensors, *, with_weights: bool = False) -> Reduce:
    """Reduce Keras objects like `model_copies`, and objects of the backend like `tensors`.

    Args:
        with_weights: Whether layers include their weights.
    """

    def reduced(thing: Any) -> Any:
        found = model_copies.reduce_keras_object(thing, with_weights=with_weights)
        return tensors.reduce(thing) if found is NotImplemented else found

    return reduced


def of_call(tensors: Tensors, *, with_weights: bool) -> Reduce:
    """Extend `by_value` to the arguments of a model's method: callbacks that only the chief runs become shells."""
    others = by_value(tensors, with_weights=with_weights)

    def reduced(thing: Any) -> Any:
        if isinstance(thing, OnChief):
            return OnChief, (thing.create(),)
        if isinstance(thing, keras.callbacks.Callback) and runs_on_chief(thing):
            # The other process never calls it, but examines what it does, such as in the middle of an epoch.
            return copyreg.__newobj__, (type(thing),), plain_attributes(thing)  # type: ignore[attr-defined]
        return others(thing)

    return reduced
