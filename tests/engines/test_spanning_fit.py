"""A model that one program trains in two processes is the model that Keras trains in one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.backends import BACKENDS
from tests.support.commands import finish
from tests.support.programs import environment

pytestmark = [
    pytest.mark.jax,
    pytest.mark.timeout(900),
    pytest.mark.skipif("jax" not in BACKENDS, reason="programs over several processes are JAX's"),
]
BOUND_S = 400.0
PROGRAM = ["-m", "tests.engines.spanning_fit"]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what Keras alone found."""
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, *PROGRAM, str(folder)]
    code, output = finish(command, environment("jax"), bound_s=BOUND_S, start=fork_server.popen)
    assert code == 0, output
    return folder


@pytest.mark.parametrize(
    ("strategy", "divided"),
    [
        ("ShardedStrategy(level=3)", 8),
        pytest.param("ShardedStrategy(level=1)", 0, marks=SLOW),
        pytest.param("ModelParallelStrategy()", 8, marks=SLOW),
        pytest.param("MirroredStrategy(engine='spmd') alone", 0, marks=SLOW),
    ],
)
def test_two_processes_train_as_one_with_a_last_batch_that_does_not_divide(
    strategy: str, divided: int, plain: Path
) -> None:
    run = ["-m", "phalanx", "run", "--workers", "2", "--backend", "jax"]
    command = [sys.executable, *run, *PROGRAM, str(plain), *strategy.split()]
    code, output = finish(command, environment("jax"), bound_s=BOUND_S, start=fork_server.popen)
    assert code == 0, output
    assert output.count(f"agrees; {divided} weights are divided") == 2, output
    assert "[Gloo]" not in output
