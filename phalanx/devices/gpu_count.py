"""The GPUs of this host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from phalanx.config.variables import VISIBLE_GPUS

HIDE_GPUS = {VISIBLE_GPUS: ""}
"""The environment of a process that computes on CPUs, whatever the host has."""
ON_DEMAND_ALLOCATION = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""That of one that takes a GPU's memory as it needs it: TensorFlow and JAX else take nearly all of it at the start."""


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this process may use."""
    visible = environment.get(VISIBLE_GPUS)
    if visible is None:
        return sum(1 for path in devices.glob("nvidia[0-9]*"))
    # CUDA stops at the first entry that is no device: "-1" and "" hide all.
    count = 0
    for entry in visible.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return count
