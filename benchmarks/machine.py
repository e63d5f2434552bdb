"""Describes what the figures depend on in addition to the code: the machine and the versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
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
    """Return the processor, memory and system of this machine, and the cores that the comparison may use."""
    return {
        "processor": processor(),
        "cores_used": len(cores),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "matmul_gflops_per_core": round(_matmul_gflops(cores[0])),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(interpreter: str) -> dict[str, str]:
    """Return the versions of an interpreter and of its packages."""
    script = [interpreter, "-c", _PRINT_VERSIONS, *PACKAGES]
    lines = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return {"python": platform.python_version()} | dict(line.split(" ", 1) for line in lines)


_TIME_MATMUL = """
import time, numpy
n, best = 1024, float("inf")
a = numpy.ones((n, n), numpy.float32)
for _ in range(20):
    start = time.perf_counter()
    a @ a
    best = min(best, time.perf_counter() - start)
print(2e-9 * n**3 / best)
"""


def _matmul_gflops(core: int) -> float:
    """Measure float32 GFlop/s of NumPy's matrix product on one core. No training on it can exceed this by much."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    pinned = f"import os; os.sched_setaffinity(0, [{core}])\n" + _TIME_MATMUL
    done = subprocess.run(
        [sys.executable, "-c", pinned], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return float(done.stdout)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
