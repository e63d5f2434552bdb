"""Caches on disk what JAX compiles, so that the next start of a program, or of a replacement worker, is faster.

JAX has such a cache (https://docs.jax.dev/en/latest/persistent_compilation_cache.html), which is off by default. A
small model's start spends three quarters of its time compiling, mostly initial values and the two halves of a step.
An entry is found only by the same computation, compiler, flags and kind of processor.

Users who set JAX_COMPILATION_CACHE_DIR, or JAX_ENABLE_COMPILATION_CACHE=false, decide for themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import time
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from phalanx.config.environment import process_environment, user_cache_directory

logger = logging.getLogger(__name__)

UNUSED_FOR_S = 30 * 24 * 3600.0
_SUFFIX = "-cache"


class _Cache(LRUCache):  # type: ignore[misc]
    """JAX's file cache with atomic writes: a worker may be killed while it writes, and others may be reading. Reading
    an entry marks it as used."""

    def get(self, key: str) -> bytes | None:
        value: bytes | None = super().get(key)
        if value is not None:
            with contextlib.suppress(OSError):
                os.utime(self.path / f"{key}{_SUFFIX}")
        return value

    def put(self, key: str, value: bytes) -> None:
        partial = self.path / f"{key}.{os.getpid()}.partial"
        partial.write_bytes(value)
        partial.replace(self.path / f"{key}{_SUFFIX}")


def install() -> None:
    """Turn the cache on, unless the user has configured it or its folder is not writable."""
    config: Any = jax.config
    decided = "JAX_COMPILATION_CACHE_DIR" in process_environment() or config.jax_compilation_cache_dir
    if decided or not config.jax_enable_compilation_cache:
        return
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_unused(folder)
    except OSError as error:
        logger.info("The JAX compilation cache is off: %s", error)
        return
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    compilation_cache._cache, compilation_cache._cache_initialized = _Cache(str(folder), max_size=-1), True


def _folder() -> Path:
    return user_cache_directory() / "jax" / _processor()


def _processor() -> str:
    """Return a digest of the processor's features: machines of different kinds may share a home directory."""
    description = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        description += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(description.encode()).hexdigest()[:12]


def _remove_unused(folder: Path) -> None:
    before = time.time() - UNUSED_FOR_S
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            if entry.stat().st_mtime < before:
                entry.unlink()
