"""The devices that JAX sees, for strategies in which one compiled program spans many."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from phalanx.config.environment import process_environment
from phalanx.devices.cpu_devices import reserve_device_threads
from phalanx.engines.spmd.placement import DATA, Placement, make_mesh
from phalanx.errors import ConfigurationError


def mesh_devices() -> list[str]:
    """The names of all devices, such as "gpu:0"; after joining a job of several processes, of all processes."""
    reserve_device_threads(process_environment())
    return list(keras.distribution.list_devices())


def mirrored_placement(devices: int | Sequence[str] | None = None) -> Placement:
    """The placement of the whole model on each device, with batches divided over them.

    Args:
        devices: Number of devices, or their names. None: all.

    Raises: ConfigurationError if there are no such devices.
    """
    known = mesh_devices()
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
