"""A server is killed and started again, and the job goes on."""

from __future__ import annotations

import json
import re
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.errors import EvictedError, PeerLostError
from tests.parameter_server.tasks import BOUND_S, Tasks
from tests.parameter_server.test_faults import BATCHES, Start, ends_soon, made_enough, start, steps, trains
from tests.support.backends import BACKENDS, FIRST

pytestmark = pytest.mark.timeout(600)
__all__ = ["start"]

EPOCHS = 60


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("synchronous", "ps/0"),
        pytest.param("asynchronous", "ps/0", marks=pytest.mark.slow),
        pytest.param("overlapped", "ps/1", marks=pytest.mark.slow),
        pytest.param("synchronous", "ps/1", marks=pytest.mark.slow),
    ],
)
def test_a_killed_server_goes_on_from_its_snapshot(start: Start, tmp_path: Path, kind: str, victim: str) -> None:
    tasks = start(kind, epochs=10_000, servers=2, settings={"SNAPSHOT_DIR": str(tmp_path / "snapshots")})
    trains(tasks)
    tasks.send(victim, signal.SIGKILL)
    tasks.processes[victim].wait()
    tasks.restart(victim)
    tasks.wait_for(lambda: f"{victim} is back" in tasks.said("worker/0"), f"{victim} is back")
    trains_on(tasks)
    # Of a killed server the updates since its snapshot are lost, but every batch of every epoch was trained once: all
    # but those whose tickets were on their way when it was killed, which are counted.
    epochs = ends_soon(tasks, *tasks.names)
    skipped = sum(map(int, re.findall(r"Up to (\d+) batches of epoch", tasks.said(victim))))
    assert steps(tasks) == (epochs * BATCHES - skipped, True), tasks.everything()
    assert f"{victim} resumes from its snapshot" in tasks.said(victim)
    assert re.search(victim + r": \d+ updates of its variables are lost", tasks.said(victim))
    assert not list((tmp_path / "snapshots").glob("*.npz"))


@pytest.mark.parametrize(
    "victim", ["worker/0", *[pytest.param(name, marks=pytest.mark.slow) for name in ("ps/0", "worker/1")]]
)
def test_logs_of_the_validation_arrive_though_a_task_is_killed_in_it(start: Start, tmp_path: Path, victim: str) -> None:
    tasks = start("validates", epochs=10_000, settings={"SNAPSHOT_DIR": str(tmp_path / "snapshots")})
    tasks.wait_for((tasks.folder / "validates").exists, "the chief validates, and the other worker waits for it")
    tasks.send(victim, signal.SIGKILL)
    tasks.processes[victim].wait()
    tasks.restart(victim)
    (tasks.folder / "go").touch()
    trains(tasks)
    trains(tasks, worker=1)
    ends_soon(tasks, *tasks.names)


@pytest.mark.skipif(not find_spec("tensorflow"), reason="the data are a tf.data.Dataset")
@pytest.mark.parametrize(
    ("backend", "victim"),
    [
        *[
            pytest.param(backend, "", id=backend, marks=[pytest.mark.slow] if backend == "jax" else [])
            for backend in BACKENDS
        ],
        *[pytest.param(FIRST, victim, marks=pytest.mark.slow, id=victim) for victim in ("worker/0", "worker/1")],
    ],
)
def test_all_workers_read_the_same_pass_of_a_shuffled_dataset(tmp_path: Path, backend: str, victim: str) -> None:
    epochs = 6 if victim else 3
    program = ["-m", "tests.parameter_server.passes_program", str(tmp_path), str(epochs), victim]
    with Tasks(tmp_path, program, servers=1, workers=2, backend=backend) as tasks:
        if victim:
            assert tasks.processes[victim].wait(BOUND_S) == -signal.SIGKILL, tasks.everything()
            tasks.restart(victim)
        assert set(tasks.ends().values()) == {0}, tasks.everything()
    labels = json.loads((tmp_path / "0.labels").read_text())
    # What a lost worker has counted of its epoch is lost, and a chief that was restarted has no history from before.
    known = labels[2:] if victim == "worker/1" else labels
    assert known == [pytest.approx(sum(range(200)))] * len(known)
    for worker in range(2):
        assert str(epochs - 1) in (tmp_path / f"{worker}.epochs").read_text().split()


@pytest.mark.slow
def test_a_server_that_does_not_come_back_ends_all_with_its_name(start: Start, tmp_path: Path) -> None:
    settings = {"SNAPSHOT_DIR": str(tmp_path / "snapshots"), "PHALANX_RETURN_TIMEOUT": "3"}
    tasks = start("asynchronous", epochs=10_000, servers=2, settings=settings)
    for worker in range(2):
        trains(tasks, worker)
    tasks.send("ps/1", signal.SIGKILL)
    assert set(tasks.ends("worker/0", "worker/1").values()) == {PeerLostError.exit_code}
    # The worker that gives up first names the server; another may hear of the chief's end before.
    reason = "lost ps/1 during training; it did not return within 3 s"
    assert reason in tasks.said("worker/0") + tasks.said("worker/1")


@pytest.mark.slow
def test_a_server_that_comes_back_without_a_snapshot_says_so(start: Start, tmp_path: Path) -> None:
    snapshots = tmp_path / "snapshots"
    tasks = start("asynchronous", epochs=10_000, settings={"SNAPSHOT_DIR": str(snapshots)})
    trains(tasks)
    tasks.send("ps/0", signal.SIGKILL)
    tasks.processes["ps/0"].wait()
    for file in snapshots.glob("*.npz"):
        file.unlink()
    tasks.restart("ps/0")
    assert set(tasks.ends("worker/0", "worker/1").values()) == {PeerLostError.exit_code}
    assert "ps/0 was killed and started again, and has no snapshot of this training" in tasks.said("worker/0")


@pytest.mark.slow
def test_a_worker_that_comes_after_the_chief_has_ended_with_an_error_ends_as_well(start: Start, tmp_path: Path) -> None:
    snapshots = tmp_path / "snapshots"
    tasks = start("late worker", epochs=10_000, settings={"SNAPSHOT_DIR": str(snapshots)})
    trains(tasks)
    tasks.wait_for((tasks.folder / "waits").exists, "worker/1 is about to train")
    tasks.send("ps/0", signal.SIGKILL)
    tasks.processes["ps/0"].wait()
    for file in snapshots.glob("*.npz"):
        file.unlink()
    tasks.restart("ps/0")
    assert tasks.ends("worker/0") == {"worker/0": PeerLostError.exit_code}
    (tasks.folder / "go").touch()
    assert tasks.ends("worker/1") == {"worker/1": PeerLostError.exit_code}
    assert "lost worker/0 during the start of `fit`" in tasks.said("worker/1")


@pytest.mark.slow
def test_a_chief_that_was_left_out_ends_nobody_when_it_goes_on(start: Start) -> None:
    tasks = start("chief stops", epochs=EPOCHS, timeout_s=20)
    tasks.wait_for(lambda: "worker/0 makes no progress" in tasks.said("ps/0"), "it is left out")
    tasks.send("worker/0", signal.SIGCONT)
    assert tasks.ends("worker/0") == {"worker/0": EvictedError.exit_code}
    tasks.restart("worker/0")
    assert set(tasks.ends().values()) == {0}, tasks.everything()
    assert "The chief was restarted" in tasks.said("worker/1")


@pytest.mark.slow
def test_a_full_disk_is_said_and_training_goes_on(start: Start) -> None:
    tasks = start("asynchronous", settings={"PHALANX_SNAPSHOTS": "/dev/full:/dev/full"})
    assert set(tasks.ends().values()) == {0}
    assert "ps/0 cannot write its snapshot (No space left on device)" in tasks.said("ps/0")


def weights(tasks: Tasks) -> list[np.ndarray[Any, Any]]:
    with np.load(tasks.folder / "0.weights.npz") as archive:
        return [archive[name] for name in archive.files]


def trains_on(tasks: Tasks) -> None:
    """Wait until the chief has finished two more epochs."""
    now = epoch(tasks)
    tasks.wait_for(lambda: epoch(tasks) >= now + 2, "training goes on")


def epoch(tasks: Tasks) -> int:
    return int((tasks.folder / "0.epoch").read_text())


def wait_for_copies(tasks: Tasks, leader: str, copy: str, count: int) -> None:
    tasks.wait_for(lambda: tasks.said(leader).count(f"{copy} holds a copy") >= count, f"{copy} has the copies")


def undisturbed(folder: Path, epochs: int) -> list[np.ndarray[Any, Any]]:
    folder.mkdir()
    program = ["-m", "tests.parameter_server.program", str(folder), "synchronous", str(epochs)]
    with Tasks(folder, program, servers=2, workers=2, backend=FIRST) as tasks:
        assert set(tasks.ends().values()) == {0}, tasks.everything()
        return weights(tasks)


@pytest.mark.slow
def test_a_server_that_was_stopped_does_not_take_the_workers_for_late(start: Start) -> None:
    tasks = start("synchronous", epochs=10_000, timeout_s=5)
    trains(tasks)
    tasks.send("ps/0", signal.SIGSTOP)
    time.sleep(7)  # longer than a worker may be late, and shorter than the workers wait
    tasks.send("ps/0", signal.SIGCONT)
    trains_on(tasks)
    made_enough(tasks, *tasks.names)
    assert "makes no progress" not in tasks.everything()


STOP, KILL = signal.SIGSTOP, signal.SIGKILL


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([(KILL, "ps/1")], id="one is killed"),
        pytest.param([(STOP, "ps/0"), (KILL, "ps/1")], id="one hangs, one is killed", marks=pytest.mark.slow),
        pytest.param([(STOP, victim) for victim in ("ps/0", "ps/1", "ps/0")], id="hang", marks=pytest.mark.slow),
        pytest.param([(KILL, victim) for victim in ("ps/1", "ps/0") * 3], id="killed", marks=pytest.mark.slow),
    ],
)
def test_with_copies_servers_that_hang_or_are_killed_cost_no_update(
    start: Start, tmp_path: Path, faults: list[tuple[signal.Signals, str]]
) -> None:
    """The copy of one that hangs leads when it has not answered for too long, and when it wakes it is the copy. For one
    that was killed no worker waits."""
    timeout_s = 8 if STOP in dict(faults) else 60
    tasks = start("synchronous", epochs=10_000, servers=2, timeout_s=timeout_s, settings={"REPLICATION": "2"})
    trains(tasks)
    for fault, victim in faults:
        other = "ps/1" if victim == "ps/0" else "ps/0"
        tasks.send(victim, fault)
        if fault == KILL:
            tasks.processes[victim].wait()
        trains_on(tasks)
        assert f"{other} leads the shards of group {victim[-1]} from now on" in tasks.said(other)
        copies = tasks.said(other).count(f"{victim} holds a copy")
        if fault == KILL:
            tasks.restart(victim)
        else:
            tasks.send(victim, signal.SIGCONT)
        wait_for_copies(tasks, other, victim, copies + 2)
        trains_on(tasks)
    epochs = made_enough(tasks, *tasks.names)
    assert "updates of its variables are lost" not in tasks.everything()
    assert "makes no progress" not in tasks.everything(), "a step would lack the samples of a worker"
    expected_weights = undisturbed(tmp_path / "undisturbed", epochs)
    for found, expected in zip(weights(tasks), expected_weights, strict=True):
        np.testing.assert_array_equal(found, expected, tasks.everything())


@pytest.mark.slow
def test_a_worker_that_has_asked_for_the_end_asks_a_new_head_as_well(start: Start) -> None:
    tasks = start("asks to stop", epochs=10_000, servers=2, settings={"REPLICATION": "2"})
    tasks.wait_for(lambda: (tasks.folder / "asked").exists(), "worker/1 asked")
    tasks.send("ps/0", signal.SIGKILL)
    (tasks.folder / "go").touch()
    assert set(tasks.ends("worker/0", "worker/1", "ps/1").values()) == {0}, tasks.everything()
    assert "ps/1 leads the shards of group 0 from now on" in tasks.said("ps/1")
    assert steps(tasks) == (BATCHES, True)
