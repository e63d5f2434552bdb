"""Selects the GPU of the local rank for each rank, as Horovod programs expect.

The launcher makes only one GPU visible to a worker, as number 0. But every Horovod program contains the line
`torch.cuda.set_device(hvd.local_rank())`, or `tf.config.set_visible_devices` with that index, which counts all GPUs of
the host. So for frameworks with such a line, this module makes all GPUs visible again, and selects the GPU that the
line would select, for programs without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from phalanx.config.environment import process_environment, set_variables
from phalanx.config.environment_variables import HOST_GPUS, VISIBLE_GPUS
from phalanx.horovod import basics


def init_for(framework: str) -> Callable[..., None]:
    """Return `hvd.init` for programs of a framework; call this before the framework looks for GPUs.

    Args:
        framework: "jax", "tensorflow" or "torch".
    """
    choose = {"tensorflow": _choose_for_tensorflow, "torch": _choose_for_torch}.get(framework)
    if choose is None:
        return basics.init
    if (gpus := process_environment().pop(HOST_GPUS, None)) is not None:
        set_variables({VISIBLE_GPUS: gpus})

    @functools.wraps(basics.init)
    def init(comm: Any = None, process_sets: Any = None) -> None:
        fresh = not basics.is_initialized()
        basics.init(comm, process_sets)
        if fresh:
            choose(basics.local_rank())

    return init


def _choose_for_torch(number: int) -> None:
    import torch

    if count := torch.cuda.device_count():
        torch.cuda.set_device(number % count)  # if there are fewer GPUs, ranks share them round-robin


def _choose_for_tensorflow(number: int) -> None:
    import tensorflow as tf
    from tensorflow.python.eager import context

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and context.context()._context_handle is None:  # otherwise already initialized with the visible GPUs
        tf.config.set_visible_devices(gpus[number % len(gpus)], "GPU")
