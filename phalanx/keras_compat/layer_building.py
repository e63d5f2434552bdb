"""Creates the variables of a model's layers from a first batch, before any step is taken.

Tested with Keras 3.15.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import keras
from keras import tree

from phalanx.keras_compat.keras_internals import Functional, compute_output_spec
from phalanx.keras_compat.model_state import instance_method

logger = logging.getLogger(__name__)


def has_built_layers(model: Any) -> bool:
    """Whether the model and all its layers have their variables."""
    return all(layer.built for layer in model._flatten_layers())


def build_layers(model: Any, x: Any) -> None:
    """Make the layers create their variables for inputs like these arrays. Nothing is computed.

    On TensorFlow, Keras builds layers while it traces a step, in which a stateful recurrent layer may create its state.
    Its symbolic call, which serves the other backends, refuses that.
    """
    if keras.backend.backend() != "tensorflow":
        compute_output_spec(model, keras_tensors(x), training=False)
        return
    import tensorflow as tf

    tensors = _tensors(x)
    # Traced, not run: tracing creates the variables.
    traced = tf.function(lambda x: model(x, training=False), autograph=False)
    try:
        traced.get_concrete_function(tensors)
    except Exception as error:
        if not model.run_eagerly:
            raise
        logger.debug("%r runs, but cannot be traced: %r", model.name, error)
        model(tensors, training=False)


def build_all(model: Any, batch: Any) -> None:
    """On TensorFlow, make layers, metrics, loss and optimizer create their variables for a batch like this one.

    Args:
        batch: `(x, y, sample_weight)`, as Keras's steps receive it.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if not has_built_layers(model):
        build_layers(model, x)
    try:
        model._symbolic_build(data_batch=batch)
    except Exception as error:
        if not model.run_eagerly:
            raise
        logger.debug("%r runs, but has no symbolic outputs: %r", model.name, error)
        outputs, targets = model(_tensors(x), training=False), _tensors(y)
        for part in (model._compile_metrics, model._compile_loss):
            if part is not None and not part.built:
                part.build(targets, outputs)
        model.optimizer.build(model.trainable_variables)


def _tensors(arrays: Any) -> Any:
    import tensorflow as tf

    return tree.map_structure(lambda array: None if array is None else tf.convert_to_tensor(array), arrays)


def graph_output_shapes(model: Any) -> list[tuple[int | None, ...]] | None:
    """Return the output shapes of a model whose graph is known; None for others. No layer is called, which would take
    up to a second for a large model."""
    if type(model).call not in (Functional.call, keras.Sequential.call) or instance_method(model, "call") is not None:
        return None
    try:
        return [tuple(output.shape) for output in model.outputs]
    except (AttributeError, ValueError):  # layers that are called in sequence, without a graph
        return None


def output_shapes(model: Any, x: Any) -> list[tuple[int | None, ...]] | None:
    """Return the shapes of a built model's outputs, with None for the number of samples; or None if they are known only
    once outputs are computed.

    Args:
        x: Arrays like the inputs, in the structure that the model takes.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they appear when the outputs are computed
            outputs = compute_output_spec(model, keras_tensors(x, any_size=True), training=False)
    except Exception as error:  # the model only computes with values
        logger.debug("The shapes of the outputs of %r are not known before they are computed: %s", model.name, error)
        return None
    return [tuple(output.shape) for output in tree.flatten(outputs) if output is not None]


def keras_tensors(arrays: Any, *, any_size: bool = False) -> Any:
    """Create symbolic tensors like these arrays; with `any_size`, for any number of samples."""

    def symbolic(array: Any) -> Any:
        kind = "string" if array.dtype.kind in "OSU" else keras.backend.standardize_dtype(array.dtype)
        return keras.KerasTensor((None, *array.shape[1:]) if any_size else array.shape, kind)

    return tree.map_structure(lambda array: None if array is None else symbolic(array), arrays)
