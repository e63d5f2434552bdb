"""Creates the variables of a model's layers from a first batch, before any step is taken.

Tested with Keras 3.15.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import tree

from phalanx.keras_compat.keras_internals import compute_output_spec


def has_built_layers(model: Any) -> bool:
    """Whether the model and all its layers have their variables."""
    return all(layer.built for layer in model._flatten_layers())


def build_layers(model: Any, x: Any) -> None:
    """Have the layers create their variables for inputs like these arrays. Nothing is computed.

    On TensorFlow Keras builds layers while it traces a step, where a stateful recurrent layer may create its state. Its
    symbolic call, which serves the other backends, refuses that.
    """
    if keras.backend.backend() != "tensorflow":
        compute_output_spec(model, keras_tensors(x), training=False)
        return
    import tensorflow as tf

    tensors = tree.map_structure(lambda array: None if array is None else tf.convert_to_tensor(array), x)
    # Traced, not run: the trace creates the variables.
    tf.function(lambda x: model(x, training=False), autograph=False).get_concrete_function(tensors)


def keras_tensors(arrays: Any, *, any_size: bool = False) -> Any:
    """Symbolic tensors like these arrays; with `any_size`, of any number of samples."""

    def symbolic(array: Any) -> Any:
        kind = "string" if array.dtype.kind in "OSU" else keras.backend.standardize_dtype(array.dtype)
        return keras.KerasTensor((None, *array.shape[1:]) if any_size else array.shape, kind)

    return tree.map_structure(lambda array: None if array is None else symbolic(array), arrays)
