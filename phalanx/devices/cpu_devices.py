"""Several CPU devices in one JAX process, for testing programs that span many devices."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping

from phalanx.config.environment_variables import JAX_THREADS
from phalanx.devices.memory_growth import is_initialized

THREADS_OF_DEVICE = 4
"""Number of threads per device. A device that waits in a collective occupies a thread of the pool that all devices
share, and matrix products need further threads: with two threads, two devices deadlocked."""
_FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def reserve_device_threads(environ: MutableMapping[str, str]) -> None:
    """Make JAX create enough threads that its CPU devices do not starve each other. Has no effect after JAX has
    initialized, or if the program has chosen a number.

    Args:
        environ: The environment of this process, which JAX reads when it initializes.
    """
    forced = _FORCED.search(environ.get("XLA_FLAGS", ""))
    config = getattr(sys.modules.get("jax"), "config", None)
    devices = max(int(forced[1]) if forced else 1, getattr(config, "jax_num_cpu_devices", 1))
    if devices > 1 and not is_initialized("jax"):
        environ.setdefault(JAX_THREADS, str(max(os.cpu_count() or 1, THREADS_OF_DEVICE * devices)))
