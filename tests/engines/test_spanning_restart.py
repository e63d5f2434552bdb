"""A `fit` with a `Checkpoint` continues in other processes, on other devices, at other levels, and ends with what an
undisturbed run of plain Keras ends with."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import PreemptedError
from tests.support import fork_server
from tests.support.backends import BACKENDS
from tests.support.commands import finish
from tests.support.programs import environment

pytestmark = [
    pytest.mark.jax,
    pytest.mark.timeout(1200),
    pytest.mark.skipif("jax" not in BACKENDS, reason="programs over several processes are JAX's"),
]
BOUND_S = 400.0
PROGRAM = ("-m", "tests.engines.spanning_resume")
FEW_EPOCHS, STEPS, EVERY = 3, 6, 2  # see the program
ELASTIC = ("-m", "phalanx", "run", "--workers", "1:2", "--devices-per-worker", "1", "--backend", "jax")
TWO = ("-m", "phalanx", "run", "--workers", "2", "--backend", "jax")


def run(folder: Path, strategy: str, launcher: Sequence[str] = (), code: int = 0, **variables: object) -> str:
    """What a run of the program says, which ends with this exit code."""
    settings = environment("jax") | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, *launcher, *PROGRAM, str(folder), strategy]
    found, output = finish(command, settings, bound_s=BOUND_S, start=fork_server.popen)
    assert found == code, output
    return output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs") / "undisturbed"
    folder.mkdir()
    run(folder, "plain")
    return folder


@pytest.fixture(scope="module")
def briefly_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in `FEW_EPOCHS`."""
    folder = tmp_path_factory.mktemp("briefly") / "undisturbed"
    folder.mkdir()
    run(folder, "plain", EPOCHS=FEW_EPOCHS)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def steps(folder: Path, rank: int) -> list[tuple[int, int, float]]:
    """The steps that this rank has taken: in which attempt, their numbers, and the losses."""
    rows = [line.split() for line in (folder / f"steps.{rank}").read_text().splitlines()]
    return [(int(attempt), int(number), float(loss)) for _, attempt, number, loss in rows]


def assert_ends_as(folder: Path, undisturbed: Path) -> None:
    with np.load(folder / "result.npz") as found, np.load(undisturbed / "result.npz") as expected:
        assert set(found.files) == set(expected.files)
        for name in found.files:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_after_a_kill_the_job_starts_again_and_continues_from_its_checkpoint(folder: Path, undisturbed: Path) -> None:
    output = run(folder, "ShardedStrategy(3)", (*TWO, "--max-restarts", "1"), DIE=15, VICTIM=0)
    assert "was killed by SIGKILL. Starting the whole job again (1 of 1)" in output
    assert "worker/0 (rank 0" in output
    assert output.count("has finished: 1") == 2, output
    assert_ends_as(folder, undisturbed)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith(".fit0."))
    assert names[1:] == ["fit0-000000036.orbax", "fit0-ledger.json"]  # and the one before, of any step
    assert re.fullmatch(r"fit0-\d+\.orbax", names[0])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_a_kill_at_any_moment_costs_no_more_than_the_interval(
    seed: int, folder: Path, briefly_undisturbed: Path
) -> None:
    drawn = random.Random(seed)
    victim, step, delay_s = drawn.randint(0, 1), drawn.randint(EVERY, FEW_EPOCHS * STEPS - 4), drawn.uniform(0.0, 0.2)
    output = run(folder, "ShardedStrategy(3)", ELASTIC, DIE=step, VICTIM=victim, DELAY=delay_s, EPOCHS=FEW_EPOCHS)
    assert f"worker/{victim} (rank {victim}" in output
    assert "was killed by SIGKILL. Starting the whole job again (1 of 10)" in output
    assert_ends_as(folder, briefly_undisturbed)
    expected = {number: loss for _, number, loss in steps(briefly_undisturbed, 0)}
    for rank in range(2):
        found = steps(folder, rank)
        for _, number, loss in found:
            assert loss == pytest.approx(expected[number], rel=1e-4), number
        last = max(number for attempt, number, _ in found if attempt == 0)
        first = min(number for attempt, number, _ in found if attempt == 1)
        # While the next checkpoint is written, there may be one step more.
        assert 0 <= last - (first - 1) <= EVERY + 1


@pytest.mark.slow
def test_any_number_of_devices_and_processes_continues_at_any_level(folder: Path, undisturbed: Path) -> None:
    preempted = {"code": PreemptedError.exit_code, "PREEMPT": 4}
    run(folder, "ShardedStrategy(3)", DEVICES=4, **preempted)
    run(folder, "ShardedStrategy(1)", DEVICES=2, **preempted)
    run(folder, "ShardedStrategy(1)", TWO, **preempted)
    run(folder, "ShardedStrategy(3)", TWO, **preempted)
    run(folder, "plain", **preempted)
    run(folder, "ModelParallelStrategy()", TWO, **preempted)
    run(folder, "ShardedStrategy(3)", DEVICES=4)
    assert_ends_as(folder, undisturbed)
