"""Memory growth is asked for before a backend has taken its memory, or refused."""

from __future__ import annotations

import sys

import pytest

from tests.support.backends import BACKENDS
from tests.support.commands import finish
from tests.support.programs import check_python, environment

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


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=[] if name == "jax" else pytest.mark.slow) for name in BACKENDS]
)
def test_memory_grows(backend: str) -> None:
    """In a process of its own: a fork has imported PyTorch. JAX heeds it, and is imported in a fraction of the time."""
    code, output = finish([sys.executable, "-c", PROGRAM.format(before="")], environment(backend), bound_s=120)
    assert code == 0, output
    assert output.splitlines()[-2:] == ["true false", "3.0"]


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "torch"])
def test_it_is_too_late_once_the_backend_has_begun(backend: str) -> None:
    program = PROGRAM.format(before="import keras; keras.ops.ones(3)")
    assert check_python("-c", program, backend=backend).splitlines()[-1] == "refused True"
