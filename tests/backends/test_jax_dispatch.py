"""Where a replica has one core, JAX computes in the thread that asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.jax

PROGRAM = """
import sys

import jax
import jax.numpy as jnp
from phalanx.backends import prepare

prepare(in_step=sys.argv[1] == "in step")
print("asynchronous", jax.config.values["jax_cpu_enable_async_dispatch"])
print(float(jax.jit(lambda x: 2 * x)(jnp.float32(21))))
"""


@pytest.mark.parametrize(
    ("cores", "kind", "asynchronous"), [("1", "in step", False), ("2", "in step", True), ("1", "", True)]
)
def test_inline_only_on_one_core_and_in_step(cores: str, kind: str, asynchronous: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind],
        env={**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "PJRT_NPROC": cores},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["asynchronous", str(asynchronous), "42.0"]
