"""Allocates GPU memory on demand, instead of reserving nearly all of it at startup.

TensorFlow and JAX read their variables once, when they first use a GPU. PyTorch always allocates on demand.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

from phalanx.devices.gpu_count import ON_DEMAND_ALLOCATION
from phalanx.errors import ConfigurationError


def set_on_demand_allocation(backend: str, environ: MutableMapping[str, str], *, enable: bool) -> None:
    """Set the variables of all backends, because a process may use TensorFlow for data and JAX for the model.

    Args:
        backend: The Keras backend of this process.
        environ: The environment to change.
        enable: Whether to allocate memory on demand, instead of reserving it.

    Raises: ConfigurationError if the backend has already initialized its devices.
    """
    if is_initialized(backend):
        settings = " and ".join(f"{name}={value}" for name, value in ON_DEMAND_ALLOCATION.items())
        raise ConfigurationError(
            f"set_memory_growth() was called too late: {backend} has reserved its memory already. Call it at the "
            f"start of the program, before creating a model or tensor, or set {settings}."
        )
    opposite = {"true": "false", "false": "true"}
    environ.update(
        ON_DEMAND_ALLOCATION if enable else {name: opposite[value] for name, value in ON_DEMAND_ALLOCATION.items()}
    )


def is_initialized(backend: str) -> bool:
    """Whether a backend has initialized its devices."""
    if backend == "jax":
        bridge = sys.modules.get("jax._src.xla_bridge")
        return bridge is not None and bool(getattr(bridge, "_backends", None))
    if backend == "tensorflow":
        context = sys.modules.get("tensorflow.python.eager.context")
        return context is not None and getattr(context.context(), "_context_handle", None) is not None
    return False
