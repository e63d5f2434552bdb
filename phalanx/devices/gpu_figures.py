"""Utilization and memory of this process's GPU, from NVIDIA's management library, which runs nothing on the GPU.

Needs the package nvidia-ml-py. Without it, or without a GPU, there are no figures.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import VISIBLE_GPUS
from phalanx.monitoring.worker_figures import GpuFigures

PACKAGE = "pynvml"


def read() -> GpuFigures | None:
    """Read the figures of the first GPU that this process may use; None if there are none."""
    opened = _open(process_environment().get(VISIBLE_GPUS))
    if opened is None:
        return None
    library, index, handle = opened
    try:
        utilization, memory = library.nvmlDeviceGetUtilizationRates(handle), library.nvmlDeviceGetMemoryInfo(handle)
        name = library.nvmlDeviceGetName(handle)
    except library.NVMLError:  # a virtual GPU, or a part of a GPU, has no such figures
        return None
    return GpuFigures(index, str(name), utilization.gpu / 100, memory.used, memory.total)


@functools.cache
def _open(visible: str | None) -> tuple[Any, int, Any] | None:
    """The library, and the index and handle of a GPU.

    Args:
        visible: The value of CUDA_VISIBLE_DEVICES: numbers or identifiers; CUDA ignores entries after an invalid one.
    """
    first = "0" if visible is None else visible.split(",")[0].strip()
    if first in ("", "-1") or importlib.util.find_spec(PACKAGE) is None:
        return None
    library: Any = importlib.import_module(PACKAGE)
    try:
        library.nvmlInit()
        handle = (
            library.nvmlDeviceGetHandleByIndex(int(first))
            if first.isdecimal()
            else library.nvmlDeviceGetHandleByUUID(first.encode())
        )
        return library, int(library.nvmlDeviceGetIndex(handle)), handle
    except library.NVMLError:  # no driver, or no such GPU
        return None
