"""The identity of this host: two processes with the same identity can share memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity(override: str | None = None) -> str:
    """Host name, running kernel and shared-memory file system, joined by hyphens.

    The name alone is not enough: containers of one host often have separate /dev/shm, and hosts created from one
    image have the same name.

    Args:
        override: Value of PHALANX_HOST_ID, which replaces the identity.
    """
    if override:
        return override
    parts = [socket.gethostname()]
    try:
        parts.append(_BOOT_ID.read_text().strip()[:8])
        parts.append(f"{os.stat(SHARED_MEMORY).st_dev:x}")
    except OSError:
        pass  # not Linux: only the name is available
    return "-".join(parts)
