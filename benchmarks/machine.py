"""What the figures depend on besides the code: the machine and the versions."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = (
    "phalanx",
    "keras",
    "jax",
    "jaxlib",
    "tensorflow-cpu",
    "tf_keras",
    "torch",
    "numpy",
    "mpi4py",
    "mpich",
)

_PRINT_VERSIONS = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
"""


def describe(cores: list[int]) -> dict[str, Any]:
    """The processor, memory and system of this machine, and the cores that the comparison may use."""
    return {
        "processor": _processor(),
        "cores_used": len(cores),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(interpreter: str) -> dict[str, str]:
    """The versions of what is installed beside that interpreter, and its own."""
    script = [interpreter, "-c", _PRINT_VERSIONS, *PACKAGES]
    lines = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return {"python": platform.python_version()} | dict(line.split(" ", 1) for line in lines)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
