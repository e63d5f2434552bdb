"""Supervisor and evaluator in real jobs: under `phalanx run`, and started by hand."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory, read
from phalanx.errors import CollectiveTimeoutError, PeerLostError
from tests.parameter_server.tasks import Tasks
from tests.supervisor.models import STEPS, make_data, make_model
from tests.support import fork_server
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import ROOT, finish
from tests.support.programs import environment

pytestmark = pytest.mark.timeout(600)

BOUND_S = 240.0
PROGRAM = "tests.supervisor.program"


def launch(
    folder: Path, *arguments: object, backend: str = FIRST, more: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """`phalanx run` of the program; its exit code and output."""
    return finish(
        [sys.executable, "-m", "phalanx", "run", *map(str, arguments)],
        {**environment(backend), "PHALANX_TIMEOUT": "60", **(more or {})},
        bound_s=BOUND_S,
        start=fork_server.popen,
    )


def noted(folder: Path, name: str) -> list[Any]:
    """What the tasks wrote to a file, line by line."""
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder: Path) -> dict[int, float]:
    """What evaluating each checkpoint in the folder gives, by step; computed here."""
    model, found = make_model(), {}
    for path in CheckpointDirectory(folder).paths():
        model.load_weights(path)
        found[read(path).step] = float(model.evaluate(*make_data(), verbose=0)[0])
    return found


@pytest.mark.parametrize(
    "backend", [FIRST, *[pytest.param(backend, marks=pytest.mark.slow) for backend in BACKENDS[1:]]]
)
@pytest.mark.parametrize(
    ("kind", "tasks"),
    [
        pytest.param("servers", ("--ps", 1, "--workers", 2), id="servers"),
        pytest.param("replicas", ("--workers", 2), id="replicas", marks=pytest.mark.slow),
    ],
)
def test_an_evaluator_evaluates_each_checkpoint_once_and_ends_with_the_job(
    kind: str, tasks: tuple[object, ...], backend: str, tmp_path: Path
) -> None:
    code, output = launch(
        tmp_path, *tasks, "--evaluator", "-m", PROGRAM, tmp_path, kind, "supervisor", 3, backend=backend
    )
    assert code == 0, output
    expected = losses(tmp_path / "run")
    evaluated = noted(tmp_path, "evaluated")
    steps = [step for step, _ in evaluated]
    assert steps == sorted(set(steps)), "each once, in order"
    # From the one with which it began, all.
    assert steps == [step for step in expected if step >= steps[0]]
    assert steps[-1] == 3 * STEPS
    for step, loss in evaluated:
        assert loss == pytest.approx(expected[step], rel=1e-4)
    ((count, best),) = noted(tmp_path, "evaluator")
    assert count == len(steps)
    assert best == pytest.approx(min(loss for _, loss in evaluated))
    content = json.loads((tmp_path / "run" / "best_evaluation.json").read_text())
    kept = read(tmp_path / "run" / "best_evaluation.weights.h5")
    assert kept.step == content["step"] == min(evaluated, key=lambda one: one[1])[0]
    assert [rank for rank in (0, 1) if noted(tmp_path, f"{rank}.ends")[0][1]] == [0], "one chief"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tasks", "saves"),
    [
        ("replicas", ("--workers", 2), ".weights.h5"),
        ("replicas", ("--workers", 2), ".keras"),
        ("servers", ("--ps", 1, "--workers", 1), ".weights.h5"),
    ],
)
def test_an_evaluator_takes_what_model_checkpoint_writes(
    kind: str, tasks: tuple[object, ...], saves: str, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboardX")
    from tests.supervisor.event_files import scalars

    arguments = (*tasks, "--evaluator", "-m", PROGRAM, tmp_path, kind, saves, 4)
    code, output = launch(tmp_path, *arguments, more={"LOGS": "1"})
    assert code == 0, output
    evaluated = dict(noted(tmp_path, "evaluated"))
    assert list(evaluated) == sorted(evaluated)
    assert list(evaluated)[-1] == 4 * STEPS
    assert scalars(tmp_path / "logs" / "validation")["evaluation_loss_vs_iterations"] == pytest.approx(evaluated)
    assert (tmp_path / "run" / f"best_evaluation{saves}").exists()


def test_an_evaluator_that_does_not_end_is_ended_after_the_training(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, time\n"
        "if json.loads(os.environ['TF_CONFIG'])['task']['type'] == 'evaluator':\n"
        "    print('evaluating', flush=True)\n"
        "    time.sleep(600)\n"
    )
    begun = time.monotonic()
    code, output = launch(tmp_path, "--workers", 1, "--evaluator", program, more={"PHALANX_EVALUATOR_GRACE": "1.5"})
    assert code == 0, output
    assert "evaluator/0 still runs 1.5 s after the training (PHALANX_EVALUATOR_GRACE); ending it" in output
    assert time.monotonic() - begun < 60


# Killed and started again.


@pytest.mark.parametrize(
    "kind", ["replicas", *[pytest.param(kind, marks=pytest.mark.slow) for kind in ("servers", "synchronous")]]
)
def test_a_job_that_was_killed_goes_on_from_its_newest_checkpoint(kind: str, tmp_path: Path) -> None:
    tasks = ("--workers", 2) if kind == "replicas" else ("--ps", 2, "--workers", 2)
    arguments = [*map(str, tasks), "-m", PROGRAM, str(tmp_path), kind, "supervisor"]
    process = fork_server.popen(
        [sys.executable, "-m", "phalanx", "run", *arguments, "100000"],
        cwd=ROOT,
        env=environment(FIRST) | {"SAVE_SECS": "0.2"},
        stdin=subprocess.DEVNULL,
        stdout=(tmp_path / "output").open("wb"),
        stderr=subprocess.STDOUT,
    )
    with process:
        try:
            until = time.monotonic() + BOUND_S
            while not (len(CheckpointDirectory(tmp_path / "run").paths()) > 3 and noted(tmp_path, "0.epochs")):
                assert time.monotonic() < until, (tmp_path / "output").read_text()
                assert process.poll() is None, (tmp_path / "output").read_text()
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)  # the tasks die with their launcher, as hard
    paths = CheckpointDirectory(tmp_path / "run").paths()
    newest = read(paths[-1])
    os.truncate(paths[-1], paths[-1].stat().st_size - 10)
    before = read(paths[-2])
    (tmp_path / "0.begins").unlink()
    (tmp_path / "1.begins").unlink()
    (tmp_path / "0.epochs").unlink()
    epochs = int(before.state["epoch"]) + 2
    code, output = launch(tmp_path, *arguments, epochs)
    assert code == 0, output
    assert f"{paths[-1]} is damaged" in output
    ((restored, step),) = noted(tmp_path, "0.begins")
    assert restored == step == before.step < newest.step
    ((_, others_step),) = noted(tmp_path, "1.begins")
    assert [epoch for epoch, _ in noted(tmp_path, "0.epochs")] == [epochs - 2, epochs - 1]
    assert noted(tmp_path, "0.ends")[0][0] == before.step + 2 * STEPS
    if kind == "replicas":
        assert others_step == step, "they start from what the chief has"


# Consistency: what is saved in the middle of asynchronous training on several servers is of one step.


CONSISTENT = """
import sys
import keras, numpy as np
import phalanx

strategy = phalanx.ParameterServerStrategy(phalanx.TFConfigClusterResolver(), phalanx.FixedShardsPartitioner(2))
with strategy.scope():
    inputs = keras.Input((4,))
    # Each update takes the same from each weight, so all of them and the step tell how many there were.
    outputs = keras.layers.Dense(6, use_bias=False, kernel_initializer="zeros")(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(1.0, momentum=0.0), loss=lambda y, p: keras.ops.mean(keras.ops.sum(p, -1)))
x = np.ones((640, 4), "float32")
supervisor = phalanx.Supervisor(sys.argv[1], save_model_secs=1e-6, saver=phalanx.Saver(None), save_summaries_secs=0)
with supervisor.managed_session(model):
    model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0)
"""


@pytest.mark.slow
def test_checkpoints_of_asynchronous_training_are_of_one_step(tmp_path: Path) -> None:
    import h5py

    program = tmp_path / "program.py"
    program.write_text(CONSISTENT)
    code, output = launch(tmp_path, "--ps", 2, "--workers", 3, program, tmp_path / "run")
    assert code == 0, output
    paths = CheckpointDirectory(tmp_path / "run").paths()
    assert len(paths) > 5
    for path in paths:
        with h5py.File(path) as file:
            kernel = np.array(file["layers/dense/vars/0"])
            iterations = int(file["optimizer/vars/0"][()])
        assert iterations == read(path).step
        np.testing.assert_allclose(kernel, -float(iterations), rtol=1e-5)
    assert read(paths[-1]).step == 3 * 640 // 16


# By hand.


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Tasks]]:
    with ExitStack() as stack:

        def of(*arguments: object, **options: Any) -> Tasks:
            program = ["-m", PROGRAM, str(tmp_path), *map(str, arguments)]
            return stack.enter_context(Tasks(tmp_path, program, backend=FIRST, **options))

        yield of


@pytest.mark.slow
@pytest.mark.parametrize("servers", [0, 1])
def test_an_evaluator_by_hand_ends_when_the_chief_says_so(
    start: Callable[..., Tasks], servers: int, tmp_path: Path
) -> None:
    kind = "servers" if servers else "replicas"
    tasks = start(kind, "supervisor", 2, servers=servers, workers=2, evaluators=1)
    assert set(tasks.ends().values()) == {0}, tasks.everything()
    assert noted(tmp_path, "evaluated")[-1][0] == 2 * STEPS


@pytest.mark.slow
def test_an_evaluator_lives_through_a_chief_that_is_started_again(start: Callable[..., Tasks], tmp_path: Path) -> None:
    tasks = start("servers", "supervisor", 400, servers=1, workers=2, evaluators=1, settings={"SAVE_SECS": "0.2"})
    tasks.wait_for(lambda: len(noted(tmp_path, "evaluated")) > 1, "the evaluator evaluates")
    tasks.send("worker/0", signal.SIGKILL)
    tasks.processes["worker/0"].wait()
    reached = noted(tmp_path, "evaluated")[-1][0]
    tasks.restart("worker/0")
    tasks.wait_for(lambda: len(noted(tmp_path, "0.begins")) == 2, "the chief comes back")
    restored, step = noted(tmp_path, "0.begins")[1]
    assert restored == step > 0
    tasks.wait_for(lambda: noted(tmp_path, "evaluated")[-1][0] > max(reached, restored), "it goes on evaluating")
    assert tasks.processes["evaluator/0"].poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicas", "servers"])
def test_a_chief_that_is_lost_before_it_is_ready_is_named(
    start: Callable[..., Tasks], kind: str, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("in the way")
    tasks = start(kind, "supervisor", 2, servers=int(kind == "servers"), workers=2, settings={"PHALANX_TIMEOUT": "5"})
    codes = tasks.ends("worker/0", "worker/1")
    assert codes == {"worker/0": 1, "worker/1": PeerLostError.exit_code}, tasks.everything()
    assert "The checkpoint of step 0 cannot be written" in tasks.said("worker/0")
    assert re.search(r"PeerLostError: .*worker/0", tasks.said("worker/1"))
    assert noted(tmp_path, "1.begins") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicas", "servers"])
def test_a_chief_that_does_not_become_ready_is_named(start: Callable[..., Tasks], kind: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    limits = {"PHALANX_TIMEOUT": "8", "PHALANX_RENDEZVOUS_TIMEOUT": "40"}
    # As a process that was stopped while it claimed the directory: the chief waits for it.
    with open(tmp_path / "run" / ".model.ckpt.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tasks = start(kind, "supervisor", 2, servers=int(kind == "servers"), workers=2, settings=limits)
        code = tasks.ends("worker/1")["worker/1"]
    assert code in (CollectiveTimeoutError.exit_code, PeerLostError.exit_code), tasks.everything()
    assert "worker/0" in tasks.said("worker/1")
    assert noted(tmp_path, "1.begins") == []
