"""Computes each operation in one thread, so that its bits do not depend on the number of cores.

A matrix product or a sum that is divided among threads is rounded where the parts are combined, and the number of parts
depends on the cores of a process.
"""

from __future__ import annotations

import importlib
from collections.abc import MutableMapping
from typing import Any

from phalanx.config.environment_variables import JAX_THREADS, VISIBLE_GPUS
from phalanx.devices.gpu_count import count_gpus
from phalanx.devices.memory_growth import is_initialized
from phalanx.errors import ConfigurationError


def compute_in_one_thread(backend: str, environ: MutableMapping[str, str]) -> None:
    """Compute each operation in one thread from now on.

    Args:
        backend: The Keras backend of this process.
        environ: The environment of this process.

    Raises: ConfigurationError if the backend has already created its threads, or if there are GPUs.
    """
    if count_gpus(environ):
        raise ConfigurationError(
            f"CommunicationOptions(deterministic=True) gives the same bits on CPUs, and this process has GPUs. Set "
            f"{VISIBLE_GPUS}=-1 to compute on CPUs, or leave out deterministic=True."
        )
    if backend == "torch":
        importlib.import_module("torch").set_num_threads(1)
        return
    if backend == "jax":
        # A second strategy of the program finds the value that the first one set.
        came_too_late = is_initialized(backend) and environ.get(JAX_THREADS) != "1"
        environ[JAX_THREADS] = "1"
    else:
        threading: Any = importlib.import_module("tensorflow").config.threading
        one = "1" in (str(threading.get_intra_op_parallelism_threads()), environ.get("TF_NUM_INTRAOP_THREADS"))
        came_too_late = is_initialized(backend) and not one
        if not is_initialized(backend):
            threading.set_intra_op_parallelism_threads(1)
    if came_too_late:
        raise ConfigurationError(
            f"CommunicationOptions(deterministic=True) was set too late: {backend} has already created its threads, "
            f"one for each core. Create the strategy at the start of the program, before a model or a tensor."
        )
