"""Reduction of Keras objects that are sent to other processes of the job by value."""

from __future__ import annotations

import copyreg
from typing import Any

import keras

from phalanx.engines.tensors import Tensors
from phalanx.keras_compat.callback_bases import OnChief
from phalanx.keras_compat.copies import model_copies
from phalanx.keras_compat.copies.object_attributes import plain_attributes
from phalanx.runtime.pickling import Reducer
from phalanx.training.chief_callbacks import runs_on_chief

ARGUMENT_ADVICE = (
    "Pass arrays, a keras.utils.PyDataset, a DataLoader or a tf.data.Dataset rather than a running generator"
)
"""Start of the advice if an argument cannot be sent."""


def value_reducer(tensors: Tensors, *, with_weights: bool = False) -> Reducer:
    """Reduce Keras objects like `model_copies`, and objects of the backend like `tensors`.

    Args:
        with_weights: Whether layers include their weights.
    """

    def reduced(obj: Any) -> Any:
        found = model_copies.reduce_keras_object(obj, with_weights=with_weights)
        return tensors.pickle_reduce(obj) if found is NotImplemented else found

    return reduced


def call_reducer(tensors: Tensors, *, with_weights: bool) -> Reducer:
    """Extend `value_reducer` to the arguments of a model's method: callbacks that only the chief runs become shells."""
    others = value_reducer(tensors, with_weights=with_weights)

    def reduced(obj: Any) -> Any:
        if isinstance(obj, OnChief):
            return OnChief, (obj.create(),)
        if isinstance(obj, keras.callbacks.Callback) and runs_on_chief(obj):
            # The other process never calls it, but examines what it does, such as in the middle of an epoch.
            return copyreg.__newobj__, (type(obj),), plain_attributes(obj)  # type: ignore[attr-defined]
        return others(obj)

    return reduced
