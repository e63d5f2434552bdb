"""What one replica computes: one file for each Keras backend, imported only when Keras runs on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from phalanx.backends import memory
from phalanx.backends.engine import Engine, Merge
from phalanx.backends.tensors import Tensors
from phalanx.backends.updater import Piece, Updater
from phalanx.errors import UnsupportedError


def prepare() -> None:
    """Call once in a process that takes part in a job, before anything is computed."""
    memory.keep_freed()
    if keras.backend.backend() == "jax":
        from phalanx.backends import jax_cache

        jax_cache.install()


def make_engine(model: Any, merge: Merge) -> Engine:
    """The engine for a compiled model on the backend that Keras runs on."""
    match keras.backend.backend():
        case "jax":
            from phalanx.backends.jax import JaxEngine

            return JaxEngine(model, merge)
        case "tensorflow":
            from phalanx.backends.tensorflow import TensorFlowEngine

            return TensorFlowEngine(model, merge)
        case "torch":
            from phalanx.backends.torch import TorchEngine

            return TorchEngine(model, merge)
        case other:
            raise _unknown(other)


def make_updater(optimizer: str, pieces: Sequence[Piece]) -> Updater:
    """An optimizer, from Keras's description of it as JSON, and what it updates, on the backend that Keras runs on."""
    match keras.backend.backend():
        case "jax":
            from phalanx.backends.jax import JaxUpdater

            return JaxUpdater(optimizer, pieces)
        case "tensorflow":
            from phalanx.backends.tensorflow import TensorFlowUpdater

            return TensorFlowUpdater(optimizer, pieces)
        case "torch":
            from phalanx.backends.torch import TorchUpdater

            return TorchUpdater(optimizer, pieces)
        case other:
            raise _unknown(other)


def make_tensors() -> Tensors:
    """How tensors of the backend that Keras runs on come to the host and back."""
    match keras.backend.backend():
        case "jax":
            from phalanx.backends.jax import JaxTensors

            return JaxTensors()
        case "tensorflow":
            from phalanx.backends.tensorflow import TensorFlowTensors

            return TensorFlowTensors()
        case "torch":
            from phalanx.backends.torch import TorchTensors

            return TorchTensors()
        case other:
            raise _unknown(other)


def _unknown(backend: str) -> UnsupportedError:
    return UnsupportedError(
        f"Keras runs on the backend {backend!r}; Phalanx trains on 'jax', 'tensorflow' and 'torch'. "
        f"Set KERAS_BACKEND to one of these before Keras is imported."
    )
