"""The GPUs of this host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from phalanx.config.environment_variables import VISIBLE_GPUS

HIDE_GPUS = {VISIBLE_GPUS: ""}
"""Variables of a process that computes on CPUs even if the host has GPUs."""
ON_DEMAND_ALLOCATION = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Variables of a process that allocates GPU memory on demand. TensorFlow and JAX reserve nearly all by default."""


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs that a process may use.

    Args:
        environment: The environment of the process.
        devices: The directory of device files.
    """
    visible = environment.get(VISIBLE_GPUS)
    if visible is None:
        return sum(1 for path in devices.glob("nvidia[0-9]*"))
    # CUDA stops at the first entry that is not a device: "-1" and "" hide all.
    count = 0
    for entry in visible.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return count
