"""Runs Python programs on a backend; what they share, importing Keras among it, is done once (`fork_server`)."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from tests.support import fork_server
from tests.support.backends import DEVICE_SETTINGS, ON_GPU
from tests.support.commands import ROOT, finish


def environment(backend: str, cache: Path | None = None) -> dict[str, str]:
    """What a program or job runs in: nothing of a job that this test may be part of itself.

    On JAX nearly all of a test's time is compilation: it is made cheap, and shared between programs with the same
    folder for it.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
    inherited.pop("TF_CONFIG", None)
    return {
        **inherited,
        "KERAS_BACKEND": backend,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **DEVICE_SETTINGS,
        **({} if ON_GPU else {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}),
        **({} if cache is None else {"JAX_COMPILATION_CACHE_DIR": str(cache)}),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # A rank that waits for too long reports it well before the bound of the test.
        "PHALANX_TIMEOUT": "240",
    }


def run_python(
    *arguments: str,
    backend: str,
    bound_s: float = 120.0,
    folder: Path = ROOT,
    starts_others: bool = False,
    variables: dict[str, str] | None = None,
) -> tuple[int | None, str]:
    """The exit code of `python *arguments` on a backend, and what it wrote, as `finish` returns them.

    Args:
        starts_others: whether the program starts Python programs itself, as `phalanx run` does without saying so.
        variables: of the environment, next to those of `environment`.
    """
    return finish(
        [sys.executable, *arguments],
        environment(backend) | (variables or {}),
        bound_s=bound_s,
        folder=folder,
        start=partial(fork_server.popen, starts_others=starts_others),
    )


def check_python(*arguments: str, backend: str, bound_s: float = 120.0) -> str:
    """What `python *arguments` wrote on a backend. AssertionError with it if it failed."""
    code, output = run_python(*arguments, backend=backend, bound_s=bound_s)
    assert code == 0, output
    return output
