"""Where compiled functions on JAX leave results for the host, and the options with which they are compiled.

On CPUs, it is the memory in which they compute. From a GPU, each array takes at least 160 us, and into pageable memory
many times as long as the bus needs (60 arrays of 1 MB: 37 ms). A compiled function that leaves its results in pinned
memory takes 1.5 ms for the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

PINNED = "pinned_host"
DETERMINISTIC_OPTIONS: dict[str, Any] = {"xla_gpu_deterministic_ops": True}
"""Compiler options for what all ranks must compute identically to the last bit. Without them, each rank's compiler
chooses the kernels that it measures as fastest, and their sums differ (seen with a norm of all gradients)."""


def pinned_memory() -> SingleDeviceSharding | None:
    """Return the host's pinned memory, for results of the default device; None if that device is the host."""
    (device,) = jnp.zeros(()).devices()
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or PINNED not in kinds:
        return None
    return SingleDeviceSharding(device, memory_kind=PINNED)


def wide_vector_options() -> dict[str, Any] | None:
    """Return compiler options for an optimizer update that one process makes for all; None if JAX does not use a CPU.

    By default, XLA uses half the width of a CPU's widest vector instructions, because of their heat. With the full
    width, Adam takes a fifth less time. Do not use it if each rank makes the update itself: the last bits of some
    optimizers (Adafactor, a centered RMSprop) depend on the width, which differs between hosts.
    """
    return {"xla_cpu_prefer_vector_width": 512} if computes_on_host() else None


def computes_on_host() -> bool:
    """Whether JAX computes on this host's CPUs."""
    backend: str = jax.default_backend()
    return backend == "cpu"
