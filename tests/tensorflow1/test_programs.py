"""Programs of TensorFlow 1 with only their imports changed, and what they need of `phalanx.compat.v1`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import fork_server
from tests.support.backends import BACKENDS
from tests.support.commands import finish
from tests.support.programs import check_python, environment, run_python

pytestmark = [
    pytest.mark.skipif("tensorflow" not in BACKENDS, reason="BACKENDS leaves out tensorflow"),
    pytest.mark.timeout(240),
]
HERE = Path(__file__).parent
BOUND_S = 200.0
LATE = {"PHALANX_RENDEZVOUS_TIMEOUT": "1"}


def run_job(*arguments: object) -> str:
    """What `phalanx run` and a program wrote. AssertionError if it failed."""
    command = [sys.executable, "-m", "phalanx", "run", "--backend", "tensorflow", *map(str, arguments)]
    code, output = finish(command, environment("tensorflow"), bound_s=BOUND_S, start=fork_server.popen)
    assert code == 0, output
    return output


def found(folder: Path) -> list[Any]:
    """What the two workers found."""
    return [json.loads((folder / f"found.{index}").read_text()) for index in range(2)]


def test_one_parameter_server_and_two_workers_fit_a_line(tmp_path: Path) -> None:
    output = run_job("--ps", 1, "--workers", 2, HERE / "linear_regression.py", tmp_path, 400)
    workers = found(tmp_path)
    for worker in workers:
        assert worker["device"] == "/job:ps/task:0"
        assert (worker["w"], worker["b"]) == (pytest.approx(2, abs=1e-2), pytest.approx(0.5, abs=1e-2))
    total = sum(worker["own"] for worker in workers)
    assert min(worker["own"] for worker in workers) > 0
    assert 400 <= max(worker["step"] for worker in workers) <= total
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert list(tmp_path.glob("model.ckpt-*.index"))
    assert "still runs" not in output, "the parameter server ends when the workers have finished"


@pytest.mark.slow  # the test above, and the cases of Horovod in sessions, cover most of it
def test_a_supervised_program_continues_from_its_checkpoint(tmp_path: Path) -> None:
    for _ in range(2):
        run_job("--ps", 1, "--workers", 2, HERE / "linear_regression.py", tmp_path, 200)
    assert all(worker["first"] >= 200 for worker in found(tmp_path))


@pytest.mark.slow  # the cases of Horovod in sessions cover most of it
def test_horovod_trains_in_a_session_as_one_process(tmp_path: Path) -> None:
    run_job("-np", 2, HERE / "horovod_session.py", tmp_path)
    one, other = found(tmp_path)
    assert one == other
    assert one["step"] == 16
    assert np.mean(one["losses"][-4:]) < np.mean(one["losses"][:4]) / 2


@pytest.mark.slow  # a third program with servers
def test_synchronous_replicas_train_as_one_process(tmp_path: Path) -> None:
    run_job("--ps", 1, "--workers", 2, HERE / "monitored_session.py", tmp_path, 40, "synchronous")
    x, w, momentum, expected = np.linspace(-1, 1, 20), 0.0, 0.0, []
    for _ in range(60):
        expected.append(w)
        momentum = 0.5 * momentum + np.mean(-2 * x * (2 * x - x * w))
        w -= 0.1 * momentum
    # What is fetched next to the update is the value of one of the steps around it.
    for step, value in found(tmp_path)[0]:
        assert min(abs(value - each) for each in expected[max(step - 2, 0) : step + 3]) < 1e-4
    assert max(step for step, _ in found(tmp_path)[0]) >= 39


@pytest.mark.slow  # a server is killed and started again
def test_training_continues_when_a_killed_server_is_back(tmp_path: Path) -> None:
    output = run_job("--ps", 1, "--workers", 2, HERE / "monitored_session.py", tmp_path, 200, "kills")
    assert re.search(r"ps/0 was killed by SIGKILL; starting it again", output)
    steps, values = zip(*found(tmp_path)[0], strict=True)
    assert max(steps) >= 199
    assert values[-1] == pytest.approx(2, abs=1e-3)


def test_one_process(tmp_path: Path) -> None:
    code, output = run_python("-m", "tests.tensorflow1.checks", backend="tensorflow", variables=LATE)
    assert code == 0, output


def test_importing_phalanx_leaves_tensorflow_as_it_is() -> None:
    code = "import phalanx, phalanx.compat, tensorflow; print(tensorflow.executing_eagerly())"
    assert "True" in check_python("-c", code, backend="tensorflow")
