"""The doctor finds what is well and what is not, and says so."""

from __future__ import annotations

import io
import json
import socket
import threading
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.cluster import ClusterSpec, JobFacts, SimpleClusterResolver, Task, doctor
from phalanx.cluster.doctor import DoctorReport, examine, show
from phalanx.cluster.software_versions import installed_software
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.job_config import JobConfig
from phalanx.config.keras_backends import keras_backend
from phalanx.errors import HandshakeError, LinkClosedError
from phalanx.version import __version__
from tests.cluster.conftest import BOUND_S, SECRET, Meeting, Ports

SETTINGS = JobConfig(secret=SECRET)


def resolver(spec: ClusterSpec, task: Task) -> SimpleClusterResolver:
    return SimpleClusterResolver(spec, task_type=task.type, task_id=task.index)


def examine_all(specs: list[ClusterSpec], wait_s: float = 20.0) -> list[DoctorReport]:
    """The doctor, run as worker 0, 1, ... at once, each with its own idea of the cluster."""
    reports: dict[int, DoctorReport] = {}

    def body(index: int) -> None:
        task = Task("worker", index)
        reports[index] = examine(resolver(specs[index], task), config=SETTINGS, wait_s=wait_s)

    threads = [threading.Thread(target=body, args=(index,), daemon=True) for index in range(len(specs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    return [reports[index] for index in range(len(specs))]


def text_of(report: DoctorReport) -> str:
    console = Console(file=io.StringIO(), width=250)
    show(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_two_doctors_measure_the_line_between_them(ports: Ports) -> None:
    for index, report in enumerate(examine_all([ports.workers(2)] * 2)):
        assert report.problems == []
        assert report.is_healthy
        assert (report.rank, report.world_size) == (index, 2)
        own, other = report.tasks[index], report.tasks[1 - index]
        assert own.state.startswith("this task")
        assert other.state.startswith("answers (pid")
        assert other.addresses == ("127.0.0.1",)
        assert other.software == installed_software()
        assert other.link is not None
        assert 0 < other.link.round_trip_s < 1
        assert abs(other.link.clock_offset_s) < 1
        assert other.link.bytes_per_s > 1e6
        text = text_of(report)
        for piece in ("No problem found", "worker/1", " ms", "MB/s", f"Phalanx {__version__}"):
            assert piece in text


def test_a_task_that_does_not_answer_is_a_problem(ports: Ports) -> None:
    spec = ports.workers(2)
    (report,) = examine_all([spec], wait_s=0.2)
    (problem,) = report.problems
    assert f"worker/1 at {spec.task_address('worker', 1)} cannot be reached: nothing listens" in problem
    assert "problem" in text_of(report)


def test_tasks_with_different_clusters_are_a_problem_on_both(ports: Ports) -> None:
    addresses = [ports.new() for _ in range(3)]
    two, three = ClusterSpec({"worker": addresses[:2]}), ClusterSpec({"worker": addresses})
    for report in examine_all([two, three], wait_s=3):
        assert any("worker/2 is at no address" in problem for problem in report.problems)


def test_a_running_job_answers_and_is_not_disturbed(ports: Ports, meeting: Meeting) -> None:
    spec = ports.workers(2)
    for index in range(2):
        meeting.start(spec, Task("worker", index), facts=JobFacts(**versions(), seed=7, extra={"floatx": "float32"}))
    meeting.nodes()
    (report,) = examine_all([spec], wait_s=3)
    assert report.problems == []
    assert "is running already (pid" in report.tasks[0].state
    assert report.tasks[1].state.startswith("is training (pid")


def versions() -> dict[str, str]:
    software = installed_software()
    return {"keras": software.keras, "backend": software.backend}


def test_names_and_addresses_that_cannot_work_are_problems(ports: Ports) -> None:
    spec = ClusterSpec({"worker": [ports.new(), "no-such-host.invalid:2222", "label..empty:2222"]})
    (report,) = examine_all([spec], wait_s=0.1)
    text = "\n".join(report.problems)
    assert "worker/1: its host name in no-such-host.invalid:2222 cannot be resolved" in text
    assert "worker/2: its host name in label..empty:2222 cannot be resolved" in text
    assert "worker/0 has a loopback address, which only its own host can reach" in text


def test_a_port_that_another_program_has_is_a_problem(ports: Ports) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        spec = ClusterSpec({"worker": [f"127.0.0.1:{other.getsockname()[1]}", ports.new()]})
        (report,) = examine_all([spec], wait_s=0.1)
    assert any("taken by another process" in problem for problem in report.problems)


def test_an_evaluator_is_examined_without_a_port(ports: Ports) -> None:
    spec = ClusterSpec({"worker": [ports.new()], "evaluator": [ports.new()]})
    report = examine(resolver(spec, Task("evaluator", 0)), config=SETTINGS, wait_s=0.1)
    assert report.rank is None
    assert "worker/0" in report.problems[0]


def test_an_evaluator_measures_its_lines_before_the_others_go(ports: Ports) -> None:
    spec = ClusterSpec({"worker": [ports.new(), ports.new()], "evaluator": [ports.new()]})
    tasks = spec.tasks
    reports: dict[str, DoctorReport] = {}

    def body(task: Task) -> None:
        reports[str(task)] = examine(resolver(spec, task), config=SETTINGS, wait_s=20.0)

    threads = [threading.Thread(target=body, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert {name: report.problems for name, report in reports.items()} == {str(task): [] for task in tasks}
    assert all(entry.link for entry in reports["evaluator/0"].tasks[:2])


def test_what_was_answered_says_more_than_that_nobody_answers_any_more(
    ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([HandshakeError("PHALANX_SECRET differs")])

    def dial(*_: object, **__: object) -> None:
        raise next(failures, LinkClosedError("nothing listens there"))

    monkeypatch.setattr(TaskIdentity, "dial", dial)
    (report,) = examine_all([ports.workers(2)], wait_s=0.5)
    (problem,) = report.problems
    assert problem.endswith("cannot be reached: PHALANX_SECRET differs")


def test_without_a_cluster_it_says_that_the_program_would_be_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert doctor.run(SimpleClusterResolver(ClusterSpec({})), config=JobConfig()) == 0
    assert "trains alone" in " ".join(capsys.readouterr().out.split())


def test_the_exit_code_tells_that_there_are_problems(ports: Ports, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.run(resolver(ports.workers(2), Task("worker", 0)), config=SETTINGS, wait_s=0.1)
    assert code == 66
    assert "cannot be reached" in " ".join(capsys.readouterr().out.split())


def test_the_backend_is_found_as_keras_finds_it(tmp_path: Path) -> None:
    environment = {"KERAS_HOME": str(tmp_path)}
    assert keras_backend(environment) == "tensorflow"
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "torch"}))
    assert keras_backend(environment) == "torch"
    assert keras_backend({**environment, "KERAS_BACKEND": "jax"}) == "jax"
    (tmp_path / "keras.json").write_text("broken")
    assert keras_backend(environment) == "tensorflow"
