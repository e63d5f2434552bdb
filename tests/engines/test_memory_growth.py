"""Memory growth is asked for before a backend has taken its memory, or refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.backends import BACKENDS, slow_after_the_first

PROGRAM = """
import os, phalanx
{before}
try:
    phalanx.config.set_memory_growth()
except phalanx.ConfigurationError as error:
    print("refused", "too late" in str(error))
else:
    print(os.environ["TF_FORCE_GPU_ALLOW_GROWTH"], os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
    import keras
    print(float(keras.ops.sum(keras.ops.ones(3))))
"""


def run(backend: str, before: str) -> list[str]:
    environment = {**os.environ, "KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    program = [sys.executable, "-c", PROGRAM.format(before=before)]
    found = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout.split("\n")[:-1]


@pytest.mark.parametrize("backend", slow_after_the_first())
def test_memory_grows(backend: str) -> None:
    assert run(backend, "") == ["true false", "3.0"]


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "torch"])
def test_it_is_too_late_once_the_backend_has_begun(backend: str) -> None:
    assert run(backend, "import keras; keras.ops.ones(3)") == ["refused True"]
