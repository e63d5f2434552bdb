"""JAX on a single core computes in the thread that asks for it.

On CPUs JAX hands a computation to a thread of its own, so that the program can prepare the next one meanwhile. On one
core there is no meanwhile: the two threads only take turns, and each turn costs. Without it a small step of a replica
(an MLP, 32 samples) took 8 % less time, one of a worker among asynchronous parameter servers (64 samples) 5 %, and a
large one as much as before.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from phalanx.config.environment import process_environment


def compute_inline_on_one_core() -> None:
    """Without effect once JAX has computed anything, and on other devices than CPUs."""
    if _cores() == 1:
        config: Any = jax.config
        config.update("jax_cpu_enable_async_dispatch", False)


def _cores() -> int:
    """How many JAX computes with, as it sizes its own pool."""
    if (threads := process_environment().get("PJRT_NPROC", "")).isdigit():
        return int(threads)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
