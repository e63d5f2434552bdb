"""Runs Python programs on a backend. Common work, such as importing Keras, is done once (`fork_server`)."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from tests.support import compilation, fork_server
from tests.support.backends import DEVICE_SETTINGS
from tests.support.commands import ROOT, finish


def environment(backend: str) -> dict[str, str]:
    """Environment of a program or job, without variables of a job that this test may be part of."""
    left_out = {"TF_CONFIG", *compilation.CHEAP}
    inherited = {
        name: value for name, value in os.environ.items() if not (name.startswith("PHALANX_") or name in left_out)
    }
    return {
        **inherited,
        "KERAS_BACKEND": backend,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **DEVICE_SETTINGS,
        **compilation.settings(backend),
        # A rank that waits too long reports this well before the time limit of the test.
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
    """Run `python *arguments` on a backend, and return its exit code and output as `finish` does.

    Args:
        starts_others: Whether the program starts Python programs itself; implied for `phalanx run`.
        variables: Environment variables in addition to those of `environment`.
    """
    return finish(
        [sys.executable, *arguments],
        environment(backend) | (variables or {}),
        bound_s=bound_s,
        folder=folder,
        start=partial(fork_server.popen, starts_others=starts_others),
    )


def check_python(*arguments: str, backend: str, bound_s: float = 120.0) -> str:
    """Run `python *arguments` on a backend, and return its output. AssertionError with the output if it fails."""
    code, output = run_python(*arguments, backend=backend, bound_s=bound_s)
    assert code == 0, output
    return output
