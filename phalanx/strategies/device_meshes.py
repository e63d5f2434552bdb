"""The devices of a strategy in which one compiled program spans many: those that JAX sees."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from phalanx.config.environment import process_environment
from phalanx.devices.cpu_devices import give_devices_threads
from phalanx.engines.spmd.placement import DATA, Placement, make_mesh
from phalanx.errors import ConfigurationError, UnsupportedError


def mesh_devices(strategy: str) -> list[str]:
    """The names of all devices, such as "gpu:0"; in a job of several processes, of all of them.

    Args:
        strategy: how the user named it.

    Raises: UnsupportedError if Keras does not run on JAX.
    """
    backend = keras.backend.backend()
    if backend != "jax":
        raise UnsupportedError(
            f"{strategy} compiles one program for many devices, which Keras does on JAX alone; here it runs on "
            f"{backend!r}. Set KERAS_BACKEND=jax before Keras is imported, or train replicas with MirroredStrategy or "
            f"MultiWorkerMirroredStrategy, which run on every backend."
        )
    give_devices_threads(process_environment())
    return list(keras.distribution.list_devices())


def mirrored_placement(devices: int | Sequence[str] | None = None) -> Placement:
    """The whole model on each device, and batches divided over them.

    Args:
        devices: their number, or their names; None: all.

    Raises:
        ConfigurationError: there are no such devices.
        UnsupportedError: see `mesh_devices`.
    """
    known = mesh_devices("MirroredStrategy(engine='spmd')")
    if devices is None:
        chosen = known
    elif isinstance(devices, int):
        chosen = known[:devices] if 0 < devices <= len(known) else []
    else:
        chosen = [str(device).lower().lstrip("/").removeprefix("device:") for device in devices]
    if not chosen or not set(chosen) <= set(known) or len(set(chosen)) < len(chosen):
        raise ConfigurationError(
            f"MirroredStrategy(engine='spmd') was given the devices {devices!r}, and JAX sees {', '.join(known)}. Name "
            f"each of those that are to be used once, or give their number."
        )
    return Placement(make_mesh((len(chosen),), (DATA,), chosen), (DATA,), DATA)
