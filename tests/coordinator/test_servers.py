"""Jobs of which only the chief runs the program: the other tasks run `phalanx.Server(...).join()`."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.errors import ConfigurationError
from tests.coordinator.serving import SERVERS
from tests.parameter_server.tasks import Tasks
from tests.support.backends import FIRST, slow_after_the_first
from tests.training.compare import assert_close

pytestmark = pytest.mark.timeout(600)

CLUSTER = {"ps": ["localhost:1"], "chief": ["localhost:2"], "worker": ["localhost:3"]}


def job(folder: Path, kind: str, backend: str, *, workers: int) -> Tasks:
    program = ["-m", "tests.coordinator.fit_program", str(folder), kind]
    return Tasks(folder, program, servers=1, workers=workers, backend=backend, settings=SERVERS, chief=True)


def found(tasks: Tasks) -> Any:
    file = tasks.folder / "found"
    assert file.exists(), tasks.everything()
    return pickle.loads(file.read_bytes())


def trained(tasks: Tasks) -> set[int]:
    """The processes that have trained on a batch."""
    return {int(path.name.partition("-")[2]) for path in tasks.folder.glob("trained-*")}


@pytest.mark.parametrize("backend", slow_after_the_first())
def test_fit_trains_on_workers_that_serve_as_one_process_does(tmp_path: Path, backend: str) -> None:
    with job(tmp_path, "synchronous", backend, workers=1) as tasks:
        pids = {tasks.processes[name].pid for name in ("chief/0", "worker/0")}
        assert set(tasks.ends().values()) == {0}, tasks.everything()
        assert trained(tasks) == pids
        result = found(tasks)
    for one, other in (("job", "plain"), ("again", "plain again")):
        assert_close(result[one]["weights"], result[other]["weights"], 1e-4, "weights")
        assert_close(result[one]["evaluated"], result[other]["evaluated"], 1e-4, "evaluated")
        for name, values in result[other]["history"].items():
            assert_close(result[one]["history"][name], values, 1e-4, name)


@pytest.mark.slow
def test_a_worker_that_is_killed_in_fit_and_started_again_takes_part_again(tmp_path: Path) -> None:
    with job(tmp_path, "pauses", FIRST, workers=2) as tasks:
        first = {tasks.processes[name].pid for name in ("chief/0", "worker/0", "worker/1")}
        tasks.wait_for(lambda: trained(tasks) == first, "all train")
        tasks.send("worker/1", signal.SIGKILL)
        tasks.processes["worker/1"].wait()
        tasks.restart("worker/1")
        again = tasks.processes["worker/1"].pid
        tasks.wait_for(lambda: again in trained(tasks), "the worker trains again")
        (tmp_path / "go").touch()
        assert set(tasks.ends().values()) == {0}, tasks.everything()
        assert len(found(tasks)["job"]["history"]["loss"]) == 4


@pytest.mark.slow
def test_the_chief_raises_what_a_worker_raises_in_fit_and_names_what_cannot_travel(tmp_path: Path) -> None:
    with job(tmp_path, "fails", FIRST, workers=2) as tasks:
        tasks.wait_for(lambda: tasks.processes["chief/0"].poll() is not None, "the chief ends")
        result = found(tasks)
    text, cause = result["error"]
    assert text == "on a worker"
    assert "in worker/" in cause
    assert "fit(x=...) cannot travel to workers that run no program" in result["generator"]


@pytest.mark.parametrize(
    ("cluster", "job_name", "message"),
    [
        (CLUSTER, "chief", "A Server of job 'chief' has nothing to serve"),
        ({**CLUSTER, "chief": []}, "worker", r"the cluster has none: .* Add a task 'chief'"),
        (CLUSTER, "worker", "The chief sends code to worker/0, .* set PHALANX_SECRET"),
    ],
)
def test_what_cannot_serve_is_refused(
    monkeypatch: pytest.MonkeyPatch, cluster: dict[str, list[str]], job_name: str, message: str
) -> None:
    monkeypatch.delenv("PHALANX_SECRET", raising=False)
    with pytest.raises(ConfigurationError, match=message):
        phalanx.Server({kind: tasks for kind, tasks in cluster.items() if tasks}, job_name=job_name, config=None)
