"""Engines compute the steps of Keras models: one package per backend, imported only when Keras runs on it.

The engines in `replica/` compute one replica in this process and merge with other processes. The engine in `spmd/`
runs one compiled program on many devices. `accelerations/` are optional.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from phalanx.arrays import allocation
from phalanx.config.environment import process_environment
from phalanx.devices import memory_growth, single_thread
from phalanx.engines.accelerations.vectorized_updater import make_vectorized_updater
from phalanx.engines.engine import Engine, Merge
from phalanx.engines.spmd.placement import Placement
from phalanx.engines.tensors import Tensors
from phalanx.engines.updater import Updater, UpdaterPiece
from phalanx.errors import UnsupportedError


def prepare(*, deterministic: bool = False) -> None:
    """Prepare a process that takes part in a job; call once, before anything is computed.

    Args:
        deterministic: Whether the bits of a result must not depend on the number of cores.

    Raises:
        UnsupportedError: Keras runs on a backend that Phalanx does not know.
        ConfigurationError: `deterministic`, and the backend has computed something or uses GPUs.
    """
    name, _ = _backend()
    allocation.keep_freed_memory()
    if deterministic:
        single_thread.compute_in_one_thread(name, process_environment())
    if name == "jax":
        from phalanx.engines.replica.jax import compilation_cache, inline_dispatch

        compilation_cache.install()
        inline_dispatch.compute_inline_on_one_core()


def set_memory_growth(enable: bool = True) -> None:
    """Allocate GPU memory as needed, instead of nearly all of it at the start (as
    `tf.config.experimental.set_memory_growth`).

    Several processes can then share a GPU. Call it at the beginning of the program. PyTorch always does so.

    Raises: ConfigurationError if the backend already uses its devices.
    """
    memory_growth.set_on_demand_allocation(_backend()[0], process_environment(), enable=enable)


def make_engine(model: Any, merge: Merge) -> Engine:
    """Return the engine for a compiled model on the backend that Keras runs on."""
    engine: Engine = _backend_class("Engine")(model, merge)
    return engine


def make_spmd_engine(model: Any, placement: Placement) -> Engine:
    """Return the engine for a compiled model that is divided over a mesh of devices. Only JAX has one."""
    from phalanx.engines.spmd.spmd_engine import SpmdEngine

    return SpmdEngine(model, placement)


def placement_scope(placement: Placement | None) -> AbstractContextManager[None]:
    """Context in which variables are created where `placement` says; with None, on the default device."""
    if placement is None:
        return nullcontext()
    from phalanx.engines.spmd import placed_model

    return placed_model.placement_scope(placement)


def placed_step_scope(placement: Placement | None) -> AbstractContextManager[None]:
    """Context for a custom step on the devices of a mesh; with None, it does nothing."""
    if placement is None:
        return nullcontext()
    from phalanx.engines.spmd import placed_program

    return placed_program.placed_step_scope(placement)


def put_on_mesh(placement: Placement, part: Any) -> Any:
    """Return a global array for a custom loop, from this process's part of its rows."""
    from phalanx.engines.spmd import placed_program

    return placed_program.put_on_mesh(placement, part)


def make_updater(optimizer: str, pieces: Sequence[UpdaterPiece], ungrouped: Collection[int] = ()) -> Updater:
    """Create an optimizer and the variables that it updates, on the backend that Keras runs on.

    Args:
        optimizer: Keras config of the optimizer, as JSON.
        pieces: The variables, or shards of them.
        ungrouped: Indices of the pieces that are loaded and fetched at every update.
    """
    return make_vectorized_updater(_backend_class("Updater"), optimizer, pieces, ungrouped)


def buffers(model: Any) -> list[Any]:
    """Return the buffers of PyTorch modules among the layers, with the interface of Keras variables; elsewhere none."""
    if keras.backend.backend() != "torch":
        return []
    from phalanx.engines.replica.torch import module_buffers

    return list(module_buffers.buffers(model))


def make_tensors() -> Tensors:
    """Return the conversions between host arrays and tensors of the backend that Keras runs on."""
    tensors: Tensors = _backend_class("Tensors")()
    return tensors


# Each backend has a package of its name in `replica`, with one module per kind of class. Class names start with these.
_PREFIXES = {"jax": "Jax", "tensorflow": "TensorFlow", "torch": "Torch"}


def _backend_class(kind: str) -> Any:
    """Return the class of this kind for the backend that Keras runs on. Only its module is imported."""
    name, prefix = _backend()
    return getattr(importlib.import_module(f"phalanx.engines.replica.{name}.{name}_{kind.lower()}"), prefix + kind)


def _backend() -> tuple[str, str]:
    """The backend that Keras runs on, and the prefix of its classes."""
    name = keras.backend.backend()
    if name not in _PREFIXES:
        raise UnsupportedError(
            f"Keras runs on the backend {name!r}; Phalanx trains on 'jax', 'tensorflow' and 'torch'. "
            f"Set KERAS_BACKEND to one of these before Keras is imported."
        )
    return name, _PREFIXES[name]
