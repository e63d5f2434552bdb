"""What one replica computes: one file for each Keras backend, imported only when Keras runs on it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Sequence
from typing import Any

import keras

from phalanx import memory
from phalanx.backends import growth
from phalanx.backends.engine import Engine, Merge
from phalanx.backends.tensors import Tensors
from phalanx.backends.updater import Piece, Updater
from phalanx.backends.vector_updater import make_vector_updater
from phalanx.errors import UnsupportedError


def prepare() -> None:
    """Call once in a process that takes part in a job, before anything is computed.

    Raises: UnsupportedError if Keras runs on a backend that Phalanx does not know.
    """
    name, _ = _backend()
    memory.keep_freed()
    if name == "jax":
        from phalanx.backends import jax_cache, jax_dispatch

        jax_cache.install()
        jax_dispatch.compute_inline_on_one_core()


def set_memory_growth(enable: bool = True) -> None:
    """Take GPU memory as it is needed, instead of nearly all of it at the start (`tf.config.experimental`'s name).

    Several processes can then share a GPU. Call it at the beginning of the program; on PyTorch it is always so.

    Raises: ConfigurationError if the backend has begun to use its devices.
    """
    growth.let_grow(_backend()[0], os.environ, enable=enable)


def make_engine(model: Any, merge: Merge) -> Engine:
    """The engine for a compiled model on the backend that Keras runs on."""
    engine: Engine = _of_backend("Engine")(model, merge)
    return engine


def make_updater(optimizer: str, pieces: Sequence[Piece], apart: Collection[int] = ()) -> Updater:
    """An optimizer, from Keras's description of it as JSON, and what it updates, on the backend that Keras runs on.

    Args:
        apart: numbers of pieces that are loaded and fetched at every update.
    """
    return make_vector_updater(_of_backend("Updater"), optimizer, pieces, apart)


def buffers(model: Any) -> list[Any]:
    """What layers keep beside Keras's variables, in the like of these: buffers of PyTorch's modules."""
    if keras.backend.backend() != "torch":
        return []
    from phalanx.backends import torch_buffers

    return list(torch_buffers.buffers(model))


def make_tensors() -> Tensors:
    """How tensors of the backend that Keras runs on come to the host and back."""
    tensors: Tensors = _of_backend("Tensors")()
    return tensors


# Each backend has a module of its name here, whose classes begin with this.
_PREFIXES = {"jax": "Jax", "tensorflow": "TensorFlow", "torch": "Torch"}


def _of_backend(kind: str) -> Any:
    """The class of this kind for the backend that Keras runs on; only its module is imported."""
    name, prefix = _backend()
    return getattr(importlib.import_module(f"phalanx.backends.{name}"), prefix + kind)


def _backend() -> tuple[str, str]:
    """The backend that Keras runs on, and the prefix of its classes."""
    name = keras.backend.backend()
    if name not in _PREFIXES:
        raise UnsupportedError(
            f"Keras runs on the backend {name!r}; Phalanx trains on 'jax', 'tensorflow' and 'torch'. "
            f"Set KERAS_BACKEND to one of these before Keras is imported."
        )
    return name, _PREFIXES[name]
