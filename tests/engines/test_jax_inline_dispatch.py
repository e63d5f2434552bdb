"""Where a process of a job has one core, JAX computes in the thread that asks for it."""

from __future__ import annotations

import pytest

from tests.support.programs import run_python

pytestmark = pytest.mark.jax

PROGRAM = """
import jax
import jax.numpy as jnp
from phalanx.engines import prepare

prepare()
print("asynchronous", jax.config.values["jax_cpu_enable_async_dispatch"])
print(float(jax.jit(lambda x: 2 * x)(jnp.float32(21))))
"""


@pytest.mark.parametrize(("cores", "asynchronous"), [("1", False), ("2", True)])
def test_inline_only_on_one_core(cores: str, asynchronous: bool) -> None:
    code, output = run_python("-c", PROGRAM, backend="jax", variables={"PJRT_NPROC": cores})
    assert code == 0, output
    assert output.split() == ["asynchronous", str(asynchronous), "42.0"]
