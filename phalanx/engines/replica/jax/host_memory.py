"""Where compiled functions on JAX leave what the host reads, and how they are compiled.

On CPUs that is the memory in which they compute. From a GPU each array takes 160 us and more, and into memory that is
not pinned many times as long as the bus takes (60 arrays of 1 MB: 37 ms). A compiled function that leaves its results
in pinned memory itself needs 1.5 ms for the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

PINNED = "pinned_host"
SAME_ON_ALL: dict[str, Any] = {"xla_gpu_deterministic_ops": True}
"""Options for compiling what all ranks must compute to the last bit. Without, each rank's compiler chooses among
kernels by what is fastest when it tries them, and their sums differ (seen with a norm of all gradients)."""


def pinned_memory() -> SingleDeviceSharding | None:
    """The host's pinned memory, for results of what the default device computes; None where that is the host."""
    (device,) = jnp.zeros(()).devices()
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or PINNED not in kinds:
        return None
    return SingleDeviceSharding(device, memory_kind=PINNED)


def wide_vectors() -> dict[str, Any] | None:
    """Options for compiling an optimizer's update that one process makes for all; None where they mean nothing.

    XLA takes half of what the widest vector instructions of a CPU could do, for fear of their heat. With all of it Adam
    takes a fifth less time. Not where each rank makes the update for itself: to the last bit some optimizers
    (Adafactor, a centered RMSprop) give other numbers with each width, which not all hosts of a job have.
    """
    return {"xla_cpu_prefer_vector_width": 512} if computes_on_host() else None


def computes_on_host() -> bool:
    """Whether JAX computes on this host's processors."""
    backend: str = jax.default_backend()
    return backend == "cpu"
