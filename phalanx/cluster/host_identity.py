"""Which host this process is on: two processes with the same answer can share memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity(override: str | None = None) -> str:
    """Host name, running kernel and shared-memory file system, in one word.

    The name alone would not do: containers of one host often have their own /dev/shm, and hosts made from one
    image the same name.

    Args:
        override: replaces it (PHALANX_HOST_ID).
    """
    if override:
        return override
    parts = [socket.gethostname()]
    try:
        parts.append(_BOOT_ID.read_text().strip()[:8])
        parts.append(f"{os.stat(SHARED_MEMORY).st_dev:x}")
    except OSError:
        pass  # Not Linux: the name is what there is.
    return "-".join(parts)
