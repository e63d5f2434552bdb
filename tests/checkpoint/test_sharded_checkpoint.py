"""Checkpoints of models that are divided over devices."""

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
    pytest.mark.timeout(600),
    pytest.mark.skipif("jax" not in BACKENDS, reason="Orbax saves arrays of JAX"),
]
BOUND_S = 500.0


def test_what_one_mesh_saves_is_restored_on_another_and_by_plain_keras(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.sharded_program", str(tmp_path)]
    settings = {**environment("jax"), "PJRT_NPROC": "8"}
    code, output = finish(command, settings, bound_s=BOUND_S, start=fork_server.popen)
    assert code == 0, output
    assert "finished" in output
