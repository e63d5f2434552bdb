"""How JAX compiles in tests: cheaply, and each program once in a run of the tests.

Compiling is most of what a small model costs on JAX. Without optimizations and the emitters of fused kernels it takes a
quarter of the time. What one process has compiled, those that come later find in a folder that all of them share.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from tests.support.backends import ON_GPU

CHEAP = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
"""For processes that run on JAX: XLA as other libraries have it may not know the flag, and would end them."""

SHARED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
FOLDER = "JAX_COMPILATION_CACHE_DIR"


def settings(backend: str) -> dict[str, str]:
    """The variables for a process that runs on a backend."""
    return {**cheap(backend), **SHARED, FOLDER: _folder()}


def cheap(backend: str) -> dict[str, str]:
    return CHEAP if backend == "jax" and not ON_GPU else {}


def _folder() -> str:
    """Of this run of the tests: the first process makes and removes it, and those that it starts inherit it."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="compiled-")
        atexit.register(_remove, os.environ[FOLDER], os.getpid())
    return os.environ[FOLDER]


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # forks have this function as well
        shutil.rmtree(folder, ignore_errors=True)
