"""GPU memory that is taken when it is needed, instead of nearly all of it at the start.

TensorFlow and JAX look at their variables once, when they first touch a GPU; PyTorch takes memory as it needs it.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

from phalanx.devices.gpu_count import ON_DEMAND_ALLOCATION
from phalanx.errors import ConfigurationError


def set_on_demand_allocation(backend: str, environ: MutableMapping[str, str], *, enable: bool) -> None:
    """Set the variables of all backends: a process may use TensorFlow for data and JAX for the model.

    Raises: ConfigurationError if the backend in use has begun to use its devices.
    """
    if _has_begun(backend):
        settings = " and ".join(f"{name}={value}" for name, value in ON_DEMAND_ALLOCATION.items())
        raise ConfigurationError(
            f"set_memory_growth() came too late: {backend} has taken its memory already. Call it at the beginning of "
            f"the program, before a model or tensor is made, or set {settings} for it."
        )
    opposite = {"true": "false", "false": "true"}
    environ.update(
        ON_DEMAND_ALLOCATION if enable else {name: opposite[value] for name, value in ON_DEMAND_ALLOCATION.items()}
    )


def _has_begun(backend: str) -> bool:
    if backend == "jax":
        bridge = sys.modules.get("jax._src.xla_bridge")
        return bridge is not None and bool(getattr(bridge, "_backends", None))
    if backend == "tensorflow":
        context = sys.modules.get("tensorflow.python.eager.context")
        return context is not None and getattr(context.context(), "_context_handle", None) is not None
    return False
