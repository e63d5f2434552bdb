"""After `kill -9` of one process of a program that spans two, the job starts again and continues from its shards."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.backends import BACKENDS
from tests.support.commands import finish
from tests.support.programs import environment

pytestmark = [
    pytest.mark.jax,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif("jax" not in BACKENDS, reason="programs over several processes are JAX's"),
]
BOUND_S = 400.0


@pytest.mark.parametrize("rank", [0, 1])
def test_the_job_continues_from_the_newest_checkpoint(rank: int, tmp_path: Path) -> None:
    killed_after = 3
    run = ["-m", "phalanx", "run", "--workers", "2", "--backend", "jax", "--max-restarts", "1"]
    command = [
        sys.executable,
        *run,
        "-m",
        "tests.engines.spanning_restart",
        str(tmp_path),
        str(rank),
        str(killed_after),
    ]
    code, output = finish(command, environment("jax", tmp_path / "compiled"), bound_s=BOUND_S, start=fork_server.popen)
    assert code == 0, output
    assert f"worker/{rank} (rank {rank}" in output
    assert "was killed by SIGKILL. Starting the whole job again (1 of 1)" in output
    begun = [int(epoch) for epoch in re.findall(r"begins with epoch (\d+)", output)]
    assert begun[:2] == [0, 0]
    # The one that was being written when the process was killed may be lost.
    assert begun[2] == begun[3]
    assert begun[2] in (killed_after - 1, killed_after)
    assert output.count("has finished; steps [4, 5]") == 2
