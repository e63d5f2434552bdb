"""On a single core, JAX computes in the calling thread.

On CPUs, JAX passes a computation to another thread, so that the program can prepare the next one meanwhile. On one
core, the two threads only take turns, and each switch costs time. Inline, a replica's small step (an MLP, 32 samples)
took 8 % less time, one of a worker with asynchronous parameter servers (64 samples) 5 % less, and a large one the same.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import JAX_THREADS


def compute_inline_on_one_core() -> None:
    """Disable asynchronous dispatch. No effect after JAX has computed anything, or on devices other than CPUs."""
    if _cores() == 1:
        config: Any = jax.config
        config.update("jax_cpu_enable_async_dispatch", False)


def _cores() -> int:
    """Return the number of cores with which JAX computes, determined as JAX sizes its thread pool."""
    if (threads := process_environment().get(JAX_THREADS, "")).isdigit():
        return int(threads)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
