"""The GPUs of this host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this process may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sum(1 for path in devices.glob("nvidia[0-9]*"))
    # CUDA stops at the first entry that is no device: "-1" and "" hide all.
    count = 0
    for entry in visible.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return count
