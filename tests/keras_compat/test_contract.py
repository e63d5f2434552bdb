"""Keras still is what `phalanx.keras_compat` relies on; see `contract.py`."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

from tests.keras_compat.contract import CHECKS
from tests.support.backends import BACKENDS
from tests.support.commands import ROOT
from tests.support.programs import environment

BOUND_S = 180.0


@functools.cache
def errors(backend: str) -> dict[str, str]:
    """The checks that fail on a backend, with their tracebacks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.keras_compat.contract"],
        cwd=ROOT,
        env=environment(backend),  # started, as a fork has imported what hooks into Keras
        stdout=subprocess.PIPE,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(BOUND_S + 20)
@pytest.mark.parametrize(
    ("backend", "name"),
    [(backend, name) for backend in BACKENDS for name, (_, backends) in CHECKS.items() if backend in backends],
)
def test_keras_is_as_expected(backend: str, name: str) -> None:
    assert name not in errors(backend), errors(backend)[name]
