"""Makes JAX compile cheaply in tests, and each program only once per test run.

Compilation dominates the cost of a small model on JAX. Without optimizations and the emitters of fused kernels, it
takes a quarter of the time. All processes share a folder of compiled programs.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from tests.support.backends import ON_GPU

CHEAP = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
"""For processes that run on JAX only: the XLA of other libraries may not support the flag and would abort."""

SHARED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
FOLDER = "JAX_COMPILATION_CACHE_DIR"


def settings(backend: str) -> dict[str, str]:
    """Environment variables for a process that runs on a backend."""
    return {**cheap(backend), **SHARED, FOLDER: _folder()}


def cheap(backend: str) -> dict[str, str]:
    return CHEAP if backend == "jax" and not ON_GPU else {}


def _folder() -> str:
    """Folder of this test run. The first process creates and removes it; its child processes inherit it."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="compiled-")
        atexit.register(_remove, os.environ[FOLDER], os.getpid())
    return os.environ[FOLDER]


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # forks have registered this function as well
        shutil.rmtree(folder, ignore_errors=True)
