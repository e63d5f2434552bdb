"""The backends that this test run covers, as named by the environment variable `BACKENDS`. They run on CPUs, or on the
available GPUs if `TEST_ON_GPU` is set."""

from __future__ import annotations

import os
from typing import Any

import pytest

from phalanx.devices.gpu_count import HIDE_GPUS, ON_DEMAND_ALLOCATION

BACKENDS = tuple(os.environ.get("BACKENDS", "torch jax tensorflow").split())
FIRST = BACKENDS[0]
"""Represents all backends where the code is the same. PyTorch comes first, because it compiles nothing."""

# Jobs of tests run in parallel and are compared digit by digit: GPUs are shared and multiply in full float32.
ON_GPU = bool(os.environ.get("TEST_ON_GPU"))
DEVICE_SETTINGS = (
    {**ON_DEMAND_ALLOCATION, "JAX_DEFAULT_MATMUL_PRECISION": "highest", "NVIDIA_TF32_OVERRIDE": "0"}
    if ON_GPU
    else HIDE_GPUS
)


def slow_after_the_first(backends: tuple[str, ...] = BACKENDS) -> list[Any]:
    """Parameters for tests of code that is the same for all backends: all but the first are marked slow."""
    return [pytest.param(name, marks=[] if name == FIRST else pytest.mark.slow) for name in backends]
