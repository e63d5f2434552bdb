"""Checks of the model for what several replicas cannot do, or would do differently."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from phalanx.arrays.tree import leaves
from phalanx.collectives.communicator import ReduceOp
from phalanx.data import LocalBatch
from phalanx.engines.updater import check_kind
from phalanx.errors import ConfigurationError, PhalanxError, UnsupportedError
from phalanx.keras_compat.model_state import names_in, optimizers, state_of_custom_layers
from phalanx.training.replica import Replica

CLIPPING = {"clip_by_global_norm", "clip_by_norm", "clip_by_average_norm", "clip_grad_norm_", "clip_grad_value_"}
"""Functions of TensorFlow, PyTorch and Optax that clip gradients."""

_SIZE_WORDS = ("shape", "size", "broadcast", "dimension", "incompatible")

_WEIGHT_SETTING_LAYERS = (keras.layers.SpectralNormalization,)


def kept_state_message(variable: Any) -> str:
    """Error message for a layer that keeps data of its samples outside of training."""
    return (
        f"The layer state {variable.path!r} changes when the model is evaluated or predicts, by what its batch is. "
        f"Replicas merge layer state in training alone, so each would keep that of its own samples. Change it only in "
        f"training: `def call(self, inputs, training=None)`, and `if training: ...assign(...)`."
    )


def check_kept_state(model: Any, replica: Replica) -> None:
    """Raise UnsupportedError on every rank if a prediction has left different layer state on some ranks."""
    variables = state_of_custom_layers(model)
    if not variables:
        return
    own = [np.asarray(keras.ops.convert_to_numpy(variable), np.float64) for variable in variables]
    lows, highs = (replica.communicator.all_reduce(own, op) for op in (ReduceOp.MIN, ReduceOp.MAX))
    for variable, low, high in zip(variables, lows, highs, strict=True):
        if not np.allclose(low, high, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise UnsupportedError(kept_state_message(variable))


def check_server_support(model: Any) -> None:
    """Raise UnsupportedError for a compiled model that parameter servers cannot train."""
    used = optimizers(model)
    if len(used) > 1:
        raise UnsupportedError(
            "The model has several optimizers; on parameter servers one optimizer trains all variables."
        )
    for optimizer in used:
        check_kind(optimizer)
    normalizes = next((layer for layer in model._flatten_layers() if isinstance(layer, _WEIGHT_SETTING_LAYERS)), None)
    if normalizes is not None:
        raise UnsupportedError(
            f"The layer {normalizes.name!r} ({type(normalizes).__name__}) sets its own weights when it is called, "
            f"and parameter servers, which store them, do not see that. Use MultiWorkerMirroredStrategy."
        )


def check_stateless(model: Any) -> None:
    """Raise UnsupportedError for a model that keeps a state for each sample, if any worker may get the next batch."""
    if (stateful := stateful_layer(model)) is not None:
        raise UnsupportedError(
            f"{stateful.name!r} of {model.name!r} is stateful: it continues with the samples of the batch before, "
            f"which another worker may have got from the parameter servers. Use MultiWorkerMirroredStrategy, or one "
            f"worker."
        )


def stateful_layer(model: Any) -> Any:
    """Return the first layer that keeps a state for each sample of a batch; None if there is none."""
    return next((layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)), None)


@contextmanager
def annotate_size_errors(data: Any, replicas: int) -> Iterator[None]:
    """Inside the context, add to the program's errors about sizes that a replica sees only a part of a batch."""
    try:
        yield
    except PhalanxError:
        raise
    except Exception as error:
        sizes = {len(leaf) for leaf in leaves(data)}
        if replicas > 1 and sizes and any(word in _core_message(error) for word in _SIZE_WORDS):
            error.add_note(
                f"Each of the {replicas} replicas sees its part of a batch, this one {min(sizes)} samples. Code that "
                f"needs the number of samples must take it from what it gets, as keras.ops.shape(x)[0], not from the "
                f"batch_size."
            )
        raise


def _core_message(error: Exception) -> str:
    """Return an error's message, without the shapes that Keras adds to any message."""
    text, _, _ = str(error).lower().partition("arguments received by")
    return text.rpartition("error encountered:")[2]


def check_batch_size(model: Any, batch: LocalBatch, replicas: int) -> None:
    """Check that stateful layers, which keep a state for each sample of a batch, are built for a replica's part of it.

    Args:
        batch: The first batch of this rank.
        replicas: Number of replicas.

    Raises: ConfigurationError if they are built for another size.
    """
    stateful = stateful_layer(model)
    if stateful is None or replicas == 1 or not batch.size:
        return
    try:
        inputs = leaves(model.inputs)
    except (AttributeError, ValueError):  # a subclassed model
        return
    fixed = {one.shape[0] for one in inputs if one is not None and one.shape[0] not in (None, batch.size)}
    if fixed:
        raise ConfigurationError(
            f"{stateful.name} is stateful, with a state for each of the {max(fixed)} samples of the Input's "
            f"batch_shape; but each of the {replicas} replicas gets its part of a global batch, {batch.size} samples "
            f"here. Give Input the part of one replica, batch_shape=({batch.size}, ...), and global batches that have "
            f"equal parts."
        )


def check_normalization(model: Any) -> None:
    """Check that no batch normalization is over all replicas' batches if the replicas do not wait for each other.

    Raises: UnsupportedError naming the layer.
    """
    for layer in model._flatten_layers():
        # A frozen layer uses the statistics that it has collected.
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized and layer.trainable:
            raise UnsupportedError(
                f"{layer.name!r} of {model.name!r} is a BatchNormalization(synchronized=True), whose replicas meet in "
                f"every step; with this strategy they do not wait for each other. Leave out synchronized=True, or use "
                f"MultiWorkerMirroredStrategy."
            )


def check_spectrograms(model: Any) -> None:
    """Check that no spectrogram is cut off relative to the loudest sample of the whole batch.

    Raises: UnsupportedError naming the layer.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.MelSpectrogram) and math.isfinite(layer.top_db):
            raise UnsupportedError(
                f"{layer.name!r} of {model.name!r} cuts off what is {layer.top_db:g} dB below the loudest sample of a "
                f"batch, of which each replica sees a part. Create it with top_db=float('inf'), which cuts off "
                f"nothing but what is below min_power, or compute it in the input pipeline."
            )


def check_clipping(model: Any) -> None:
    """Check that a custom `train_step` does not clip gradients, which are only this replica's at that point.

    Raises: UnsupportedError naming the function.
    """
    kind = type(model)
    names = names_in(model.train_step)
    for name in [each for each in names if each in vars(kind)]:
        names |= names_in(vars(kind)[name])
    if clips := sorted(names & CLIPPING):
        raise UnsupportedError(
            f"The train_step of {kind.__name__} uses {clips[0]}. It sees the gradients of this replica's part of the "
            f"batch, before they are merged, so it clips other gradients than one process would. "
            f"Let the optimizer clip what is merged: clipnorm=, global_clipnorm= or clipvalue= of Keras's optimizers. "
            f"Or train in a custom loop and clip what strategy.reduce('MEAN', gradients) returns."
        )
