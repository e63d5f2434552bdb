"""Whole jobs of which members are killed while they train: the model is the one that an undisturbed job makes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.backends import BACKENDS, FIRST
from tests.support.programs import check_python, run_python

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).with_name("program.py")
SHARED_MEMORY = Path("/dev/shm")
BOUND_S = 240.0
EPOCHS = 4


class Run:
    """A job that has ended."""

    def __init__(self, folder: Path, backend: str, workers: str, *arguments: str, epochs: int = EPOCHS):
        folder.mkdir()
        command = ["-m", "phalanx", "run", "-v", "--workers", workers, str(PROGRAM), str(folder)]
        self.code, self.output = run_python(
            *command, "--epochs", str(epochs), *arguments, backend=backend, bound_s=BOUND_S
        )
        assert not list(SHARED_MEMORY.glob("phalanx*"))
        for pid in re.findall(r"started on localhost, pid (\d+)", self.output):
            assert not _is_ours(int(pid)), f"process {pid} is left"
        self.events = sorted(
            (
                {**json.loads(line), "life": log.stem}
                for log in folder.glob("worker-*.log")
                for line in log.read_text().splitlines()
            ),
            key=lambda event: event["time"],
        )
        self.result: dict[str, Any] = {}
        if (folder / "result.json").exists():
            self.result = json.loads((folder / "result.json").read_text())
            self.weights = np.load(folder / "weights.npy")

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def is_like(self, other: Run) -> None:
        """The same model, the same history, every sample used once in every epoch."""
        assert self.code == 0, self.output
        np.testing.assert_allclose(self.weights, other.weights, atol=1e-3)
        for name, values in other.result["history"].items():
            np.testing.assert_allclose(self.result["history"][name], values, rtol=1e-3, atol=1e-3, err_msg=name)
        np.testing.assert_allclose(self.result["loss"], other.result["loss"], rtol=1e-3, atol=1e-3)
        finished = self.of_kind("finished")
        assert {event["weights"] for event in finished} == {finished[0]["weights"]}, finished
        assert self.result["ledger"] == {str(epoch): [1] for epoch in range(len(other.result["history"]["loss"]))}


def _is_ours(pid: int) -> bool:
    try:
        return b"fork_template" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The job without losses, once for each backend."""
    made: dict[str, Run] = {}

    def run(backend: str) -> Run:
        if backend not in made:
            made[backend] = Run(tmp_path_factory.mktemp("undisturbed") / backend, backend, "1:3")
            assert made[backend].code == 0, made[backend].output
        return made[backend]

    return run


def test_two_are_killed_the_chief_among_them_and_return(tmp_path, undisturbed):
    kills = ("--kill", "worker/1:1:10th", "--kill", "worker/0:1:12th")
    run = Run(tmp_path / "run", FIRST, "1:3", *kills, "--hold", "0.25")
    run.is_like(undisturbed(FIRST))
    assert len(run.of_kind("killed")) == 2
    assert "worker/1 was killed by SIGKILL; starting it again (1 of 10)" in run.output


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ("data", "The ranks were given different data: the values of this worker are not those of the chief"),
        pytest.param("model", "The model is not the same on all ranks: variable 0 is", marks=pytest.mark.slow),
        pytest.param("optimizer", "The ranks got different arguments: optimizer is", marks=pytest.mark.slow),
        pytest.param("evaluation", "The ranks were given different data: rank 0 has", marks=pytest.mark.slow),
    ],
)
def test_one_that_returns_with_another_program_leaves_and_the_others_continue(tmp_path, undisturbed, other, text):
    run = Run(tmp_path / "run", FIRST, "1:3", "--kill", "worker/1:1:5th", "--hold", "0.25", "--returns-with", other)
    run.is_like(undisturbed(FIRST))
    assert "worker/1 ended with exit code 67; the others continue without it" in run.output, run.output
    assert text in run.output, run.output


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), ("--deterministic",)])
def test_one_that_returns_with_data_in_another_order_leaves_and_the_others_continue(tmp_path, kind):
    """In the middle of an epoch, where its first batches were not compared with those of the others."""
    same = "1:3", "--batches", "--returns-with", "order", *kind
    undisturbed = Run(tmp_path / "undisturbed", FIRST, *same)
    run = Run(tmp_path / "run", FIRST, *same, "--kill", "worker/1:1:5th", "--hold", "0.25")
    assert run.code == 0, run.output
    assert "worker/1 ended with exit code 67; the others continue without it" in run.output
    assert "The ranks read different global batches from the PyDataset" in run.output
    np.testing.assert_allclose(run.weights, undisturbed.weights, atol=1e-3)


@pytest.mark.slow
def test_one_that_returns_reads_what_all_compare(tmp_path):
    """The first batches of each epoch of a PyDataset are compared between the ranks: the loss comes in between two
    steps, and the other takes none alone where two are needed."""
    plain = Run(tmp_path / "plain", FIRST, "1:2", "--batches")
    run = Run(tmp_path / "run", FIRST, "2:2", "--batches", "--kill", "worker/1:1:10th")
    assert run.code == 0, run.output
    assert "worker/1 joined" in run.output
    assert {event["members"] for event in run.of_kind("step")} == {2}
    np.testing.assert_allclose(run.weights, plain.weights, atol=1e-3)


@pytest.mark.slow
def test_one_that_returns_draws_as_the_others_have_drawn(tmp_path):
    """From a DataLoader's own generator, from which these have drawn in each epoch before."""
    pytest.importorskip("torch")
    plain = Run(tmp_path / "plain", FIRST, "1:2", "--loader")
    run = Run(tmp_path / "run", FIRST, "2:2", "--loader", "--kill", "worker/1:1:30th")
    assert run.code == 0, run.output
    assert "worker/1 joined" in run.output
    returned = [event["epoch"] for event in run.of_kind("step") if event["life"] == "worker-1.2"]
    assert 0 < returned[0] <= returned[-1] == 3
    np.testing.assert_allclose(run.weights, plain.weights, atol=1e-3)
    assert all(counts == [1] for counts in run.result["ledger"].values())


@pytest.mark.slow
def test_members_that_end_with_code_0_in_the_middle_return(tmp_path, undisturbed):
    """One exits, and the chief's handler of SIGTERM does. Three are needed; a later loss is made good as well."""
    leave = ("--exit", "worker/1:1:5", "--terminate", "worker/0:1:10", "--kill", "worker/2:1:15th")
    run = Run(tmp_path / "run", FIRST, "3:3", *leave)
    run.is_like(undisturbed(FIRST))
    assert len(run.of_kind("left")) == 2
    for task in ("worker/0", "worker/1"):
        assert f"phalanx: {task} left with exit code 0 before the end; starting it again (1 of 10)" in run.output
    assert "phalanx: worker/0 left before the end; 2 of 3 workers remain" in run.output
    assert "worker/2 was killed by SIGKILL; starting it again (1 of 10)" in run.output
    assert {event["members"] for event in run.of_kind("step")} == {3}


@pytest.mark.slow
def test_one_that_returns_takes_part(tmp_path, undisturbed):
    """The job waits for it, as two members are needed."""
    run = Run(tmp_path / "run", FIRST, "3:3", "--kill", "worker/2:1:10th")
    run.is_like(undisturbed(FIRST))
    assert "2 workers remain, and 3 are needed: waiting for others" in run.output
    assert "worker/2 joined" in run.output
    steps = [event for event in run.of_kind("step") if event["life"] == "worker-2.2"]
    assert steps
    assert {event["members"] for event in steps} == {3}
    assert {event["rank"] for event in steps} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_returns_merges_as_the_others_what_it_alone_has_seen(tmp_path, backend):
    command = [
        "-m",
        "phalanx",
        "run",
        "-v",
        "--workers",
        "2:3",
        str(PROGRAM.with_name("rare_events.py")),
        str(tmp_path),
    ]
    output = check_python(*command, backend=backend, bound_s=BOUND_S)
    assert "worker/2 joined" in output
    results = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(3)]
    assert results == [results[0]] * 3
    assert results[0]["members"] == 3
    # The chief had no rare sample and found a mean: each of three ranks counts a third.
    assert results[0]["loss"] == pytest.approx(49 / 3, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_returns_continues_from_what_an_earlier_fit_has_left(tmp_path, backend):
    def run(*kill: str) -> list[Any]:
        folder = tmp_path / "-".join(("run", *kill))
        folder.mkdir()
        script = str(PROGRAM.with_name("two_fits.py"))
        command = ["-m", "phalanx", "run", "-v", "--workers", "2:3", script, str(folder), *kill]
        output = check_python(*command, backend=backend, bound_s=BOUND_S)
        assert ("worker/2 joined" in output) == bool(kill)
        return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(3)]

    undisturbed, disturbed = run(), run("kill")
    assert disturbed == [disturbed[0]] * 3
    assert disturbed[0]["members"] == 3
    assert disturbed[0]["rate"] == undisturbed[0]["rate"]
    assert disturbed[0]["loss"] == pytest.approx(undisturbed[0]["loss"], rel=1e-4)


@pytest.mark.slow
def test_replicas_that_meet_rarely(tmp_path):
    """What a lost one did since they met is lost with it, the chief's too; they go on, and it comes back."""
    run = Run(tmp_path / "run", FIRST, "1:3", "--period", "7", "--kill", "worker/0:1:10th", "--hold", "0.6", epochs=6)
    assert run.code == 0, run.output
    assert "worker/0 joined" in run.output
    finished = run.of_kind("finished")
    assert len(finished) == 3
    assert len({event["weights"] for event in finished}) == 1
    counts = [count for counts in run.result["ledger"].values() for count in counts]
    assert set(counts) == {0, 1}
    assert run.result["ledger"]["5"] == [1]
    losses = run.result["history"]["loss"]
    assert losses[-1] < losses[0] / 2
    later = [event for event in run.of_kind("step") if event["life"] == "worker-0.2"]
    assert {event["rank"] for event in later} == {2}


@pytest.mark.parametrize(
    "backend", [name if name == FIRST else pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS]
)
def test_losses_change_no_bit_of_deterministic_training(tmp_path, backend):
    """Not of its dropout either; in which step a member is lost or comes back is up to the machine."""
    plain = Run(tmp_path / "plain", backend, "1:2", "--deterministic", epochs=2)
    kills = ("--kill", "worker/0:1:10th", "--kill", "worker/2:1:14th")
    run = Run(tmp_path / "run", backend, "1:3", "--deterministic", *kills, "--hold", "0.25", epochs=2)
    assert (plain.code, run.code) == (0, 0), run.output
    assert len(run.of_kind("killed")) == 2
    assert len({event["members"] for event in run.of_kind("step")}) > 1
    assert run.weights.tobytes() == plain.weights.tobytes()
    assert run.result["history"] == plain.result["history"]
    assert run.result["loss"] == plain.result["loss"]
    assert run.result["ledger"] == plain.result["ledger"]


@pytest.mark.slow
@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="the gradients of embeddings are rows on TensorFlow only")
def test_rows_of_embeddings_are_those_of_a_fixed_job(tmp_path):
    """Adam squares the gradient of each occurrence of a row by itself."""
    plain = Run(tmp_path / "plain", "tensorflow", "2", "--words")
    run = Run(tmp_path / "run", "tensorflow", "1:3", "--words", "--kill", "worker/0:1:10th", "--hold", "0.25")
    run.is_like(plain)
    assert "worker/0 was killed by SIGKILL" in run.output


def test_all_are_killed(tmp_path):
    kills = [part for task in range(2) for part in ("--kill", f"worker/{task}:1:0.2")]
    run = Run(tmp_path / "run", FIRST, "1:2", *kills, "--pace", "0.05")
    assert run.code == 128 + 9, run.output
    assert "was killed by SIGKILL" in run.output


@pytest.mark.parametrize(
    ("workers", "text"),
    [("3:2", "the minimum comes first"), ("0:2", "at least 1 worker is needed"), ("a:b", "not a number of workers")],
)
def test_wrong_numbers_of_workers(workers, text):
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", "--workers", workers, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert text in " ".join(done.stderr.split())


def test_a_loop_of_ones_own(tmp_path):
    command = ["-m", "phalanx", "run", "--workers", "1:3", str(PROGRAM.with_name("loop.py")), str(tmp_path)]
    output = check_python(*command, backend=FIRST, bound_s=BOUND_S)
    assert "worker/1 joined" in output  # at the first call in which all take part
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("result-*"))]
    assert {result[0] for result in results} == {float(sum(range(480)))}
    assert all(resets >= 1 for _, _, resets in results[:1])


@pytest.mark.slow
def test_a_loop_of_ones_own_that_fits(tmp_path):
    """A loss within a `fit` is survived there, and who was lost comes back at a commit, to what the others have."""
    command = ["-m", "phalanx", "run", "--workers", "2:3", str(PROGRAM.with_name("fits.py")), str(tmp_path)]
    check_python(*command, backend=FIRST, bound_s=BOUND_S)
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("result-*"))]
    assert len(results) == 3
    epochs, sizes, weights = results[0]
    assert results == [results[0]] * 3
    assert epochs == len(sizes) == 40
    assert sizes[1] == 2
    assert sizes[-1] == 3
    np.testing.assert_allclose(weights[0], np.ones((4, 1)), atol=0.05)


@pytest.mark.slow
def test_fewer_and_more_are_wanted(tmp_path, undisturbed):
    """`phalanx scale`, while the job runs: the model is the same all the same."""
    environment = {**os.environ, "KERAS_BACKEND": FIRST, "PHALANX_JOBS": str(tmp_path / "jobs")}
    folder = tmp_path / "run"
    folder.mkdir()
    phalanx = [sys.executable, "-m", "phalanx"]
    with subprocess.Popen(
        [*phalanx, "run", "-v", "--workers", "1:3", str(PROGRAM), str(folder), "--hold", "0.4", "--gate", "3"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:

        def ask(*arguments: str) -> str:
            done = subprocess.run(
                [*phalanx, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            return done.stdout + done.stderr

        assert job.stdout is not None
        lines = []
        for line in job.stdout:
            lines.append(line)
            if "worker/2 (rank 2) started" in line and "scale" not in lines:
                until = time.monotonic() + 120
                while "generation 1" not in (state := ask("status")):
                    assert time.monotonic() < until, state
                assert "3 of 1 to 3 workers" in state
                assert "it accepts 1 to 3" in ask("scale", "-n", "4")
                assert "2 workers requested" in ask("scale", "-n", "2")
                (folder / "go").touch()
                lines.append("scale")
            if "worker/2 (rank 2) ended" in line and lines.count("scale") == 1:
                assert "2 of 1 to 3 workers" in ask("status")
                assert "3 workers requested" in ask("scale", "-n", "3")
                lines.append("scale")
        assert job.wait(30) == 0, "".join(lines)
    output = "".join(lines)
    assert "worker/2 leaves the job: fewer workers are requested" in output
    assert "No job is running here" in ask("status")
    assert list((tmp_path / "jobs").iterdir()) == []
    np.testing.assert_allclose(np.load(folder / "weights.npy"), undisturbed(FIRST).weights, atol=1e-3)
