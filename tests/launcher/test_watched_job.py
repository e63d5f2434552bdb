"""What others see of a running job, and what they can ask its launcher for."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from phalanx.errors import ConfigurationError, LinkClosedError
from phalanx.launcher.failures.failure_report import without_missing_files
from phalanx.launcher.failures.root_cause import WorkerExit
from phalanx.launcher.host_messages import WorkerDiagnostics
from phalanx.launcher.watching import job_follower
from phalanx.launcher.watching.job_connection import ControlRequest, send_request, short_name
from phalanx.launcher.watching.job_control import JobControl, RunningJob
from phalanx.launcher.watching.job_follower import JobFollower, read_events, read_view
from phalanx.launcher.watching.job_recorder import MAX_RECENT, JobRecorder
from phalanx.monitoring import job_events as events
from phalanx.monitoring.job_view import replay
from phalanx.monitoring.worker_figures import FinishedEpoch, SavedCheckpoint, TaskReport, WorkerFigures
from phalanx.runtime.crash_report import CrashReport

TASKS = ["worker/0", "worker/1"]


class Job:
    """What is done with it, its hosts and its members."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.running = RunningJob(*[cast("Any", self)] * 3)

    @property
    def loop(self) -> Job:
        return self

    def run_soon(self, action: Callable[[], None]) -> None:
        action()

    def stop(self, number: int) -> None:
        self.done.append(signal.Signals(number))

    def request_checkpoint(self) -> None:
        self.done.append("checkpoint")

    def scale(self, workers: int) -> None:
        if workers > 2:
            raise ConfigurationError("it accepts 1 to 2")
        self.done.append(workers)

    def drain(self, host: str) -> None:
        self.done.append(host)


def begin(recorder: JobRecorder, kind: str = events.ELASTIC) -> None:
    recorder.record(events.JobStarted(1.0, "job", "train.py", kind, TASKS, 1, 2, "host", 1, "0.1.0"))
    for rank, task in enumerate(TASKS):
        recorder.record(events.TaskStarted(1.0, task, rank, "host", 10 + rank))


def report(steps: int, **figures: object) -> TaskReport:
    return TaskReport("gradients", 0, steps, 0.0, True, WorkerFigures(steps=steps, **figures))  # type: ignore[arg-type]


@pytest.fixture(params=["short", "long" * 40])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Of a socket; kernels accept no name of more than about a hundred bytes."""
    folder = tmp_path / request.param
    folder.mkdir()
    return folder / "job.sock"


@pytest.fixture
def watched(path: Path) -> Iterator[tuple[JobRecorder, Job, JobControl]]:
    recorder, job = JobRecorder(), Job()
    with JobControl(path, recorder) as control:
        control.job = job.running
        yield recorder, job, control
    assert not path.exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "phalanx-job-control"]


def test_one_who_follows_has_the_launchers_state(path: Path, watched: tuple[JobRecorder, Job, JobControl]) -> None:
    recorder, _, _ = watched
    begin(recorder)
    follower = JobFollower(path)
    assert follower.update() == []  # the whole state comes first
    assert follower.view == recorder.view
    recorder.message("something")
    (event,) = follower.update()
    assert isinstance(event, events.Noticed)
    assert follower.view == recorder.view
    for _ in range(MAX_RECENT + 1):
        recorder.message("more than is kept")
    assert follower.update() == []
    assert follower.view == recorder.view
    recorder.record(events.JobEnded(9.0, 0, "over"))
    follower.update()
    assert follower.is_gone


def test_a_folder_that_cannot_hold_the_socket_ends_no_job(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with JobControl(tmp_path / "file" / "job.sock", JobRecorder()):
        pass


def test_events_end_with_the_last_whole_line_where_the_disk_is_full(tmp_path: Path) -> None:
    """What is written later, when there is room again, would follow a part of a line."""

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:10] if self.tell() else data)

    with Full(tmp_path / events.EVENTS_FILE, "wb") as file:
        recorder = JobRecorder(file)  # type: ignore[arg-type]
        begin(recorder)
        assert recorder.problem == "No space left on device"
    assert [type(event) for event in read_events(tmp_path)] == [events.JobStarted]


def test_a_launcher_that_is_gone_is_noticed(path: Path) -> None:
    follower = JobFollower(path)
    assert follower.update() == []
    assert follower.is_gone
    with pytest.raises(LinkClosedError, match="does not answer"):
        send_request(path, ControlRequest())


def test_who_follows_a_job_learns_how_it_ended(path: Path) -> None:
    """Launchers end with their jobs, and who follows them looks once in a while."""
    recorder, follower = JobRecorder(), JobFollower(path)
    with JobControl(path, recorder):
        begin(recorder)
        for _ in range(2):
            follower.update()
        recorder.record(events.JobEnded(9.0, 0, "over"))
        looks = threading.Timer(0.1, follower.update)
        looks.start()
    looks.join()
    assert (follower.view.status, follower.is_gone, follower.problem) == ("succeeded", True, "")


def test_a_launcher_that_does_not_answer_is_not_taken_for_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be stopped (Ctrl-Z), or its host overloaded."""
    monkeypatch.setattr(job_follower, "ANSWER_S", 0.1)
    monkeypatch.setattr(job_follower, "SILENT_ANSWER_S", 0.1)
    follower = JobFollower(path)
    with socket.socket(socket.AF_UNIX) as stopped:
        with short_name(path) as name:
            stopped.bind(name)
        stopped.listen(1)
        for _ in range(5):  # more than may wait there
            assert follower.update() == []
            assert (follower.is_gone, follower.problem) == (False, "launcher does not answer")
    path.unlink()
    recorder = JobRecorder()
    begin(recorder)
    monkeypatch.undo()
    with JobControl(path, recorder):
        follower.update()
        assert (follower.is_gone, follower.problem, follower.view.wanted) == (False, "", 2)
    follower.update()
    assert (follower.is_gone, follower.problem) == (True, "launcher gone")


def test_a_socket_of_another_user_is_asked_nothing(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root may act as another user")
    with socket.socket(socket.AF_UNIX) as theirs, short_name(path) as name:
        theirs.bind(name)
        os.seteuid(65534)
        try:
            theirs.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(LinkClosedError, match="belongs to another user"):
            send_request(path, ControlRequest())


def test_what_is_asked_for_is_done_or_refused(path: Path, watched: tuple[JobRecorder, Job, JobControl]) -> None:
    recorder, job, control = watched
    begin(recorder)
    for rank in range(2):
        recorder.task_reported(f"worker/{rank}", rank, report(1))
    recorder._flush()
    assert "saves its state" in send_request(path, ControlRequest("stop")).text
    send_request(path, ControlRequest("checkpoint"))
    send_request(path, ControlRequest("scale", workers=2))
    assert job.done == [signal.SIGTERM, "checkpoint", 2]
    for request, reason in (
        (ControlRequest("scale", workers=3), "it accepts 1 to 2"),
        (ControlRequest("drain", host="host"), "no other host"),
        (ControlRequest("explode"), "and not explode"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            send_request(path, request)
    control.job = None
    with pytest.raises(ConfigurationError, match="about to start"):
        send_request(path, ControlRequest("stop"))
    assert len(job.done) == 3


def test_what_is_no_request_does_not_end_the_service(path: Path, watched: tuple[JobRecorder, Job, JobControl]) -> None:
    for content in (b"", b"nonsense\n", b"x" * 10_000, b"\xff\xfe\n", b'"\xff"\n', b"[]\n"):
        with socket.socket(socket.AF_UNIX) as connection, short_name(path) as name:
            connection.connect(name)
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # it does not read all of what is too long
                while connection.recv(4096):
                    pass
    assert send_request(path, ControlRequest()).view is not None


def test_the_file_has_what_is_needed_for_the_same_state_and_few_figures(tmp_path: Path) -> None:
    now = [1.0]
    with open(tmp_path / events.EVENTS_FILE, "wb", 0) as file:
        recorder = JobRecorder(file, clock=lambda: now[0])
        begin(recorder, events.FIXED)
        for second in range(2000):
            now[0] = 2.0 + second
            for rank, task in enumerate(TASKS):
                recorder.task_reported(task, rank, report(second, samples=10 * second))
        recorder.task_reported("worker/0", 0, report(2000, samples=20_000))
        recorder.task_exited(WorkerExit(0, "worker/0", "host", 10, 0, 0))
        recorder.record(events.JobEnded(now[0] + 1, 0, "over"))
        file.write(b'{"type": "notic')  # the launcher was killed here
    kept = list(read_events(tmp_path))
    assert sum(isinstance(event, events.Measured) for event in kept) < 1200
    view = read_view(tmp_path)
    assert (view.status, view.ended_at) == ("succeeded", recorder.view.ended_at)
    assert view.steps == 2000, "the last figures are there"
    assert replay(kept) == view


def test_the_file_has_the_last_figures_of_each_task_whenever_it_exits(tmp_path: Path) -> None:
    now = [1.0]
    with open(tmp_path / events.EVENTS_FILE, "wb", 0) as file:
        recorder = JobRecorder(file, clock=lambda: now[0])
        begin(recorder, events.FIXED)
        for rank, task in enumerate(TASKS):
            recorder.task_reported(task, rank, report(1, samples=10))
        now[0] = 10.0
        recorder.task_reported("worker/0", 0, report(1, samples=10))
        now[0] = 10.1
        recorder.task_reported("worker/1", 1, report(2, samples=20))
        recorder.task_exited(WorkerExit(1, "worker/1", "host", 11, 0, 0))
        now[0] = 10.6
        recorder.task_reported("worker/0", 0, report(2, samples=20))
        now[0] = 10.7
        recorder.task_exited(WorkerExit(0, "worker/0", "host", 10, 0, 0))
    assert read_view(tmp_path).samples == recorder.view.samples == 40


def test_figures_that_were_left_out_are_in_the_file_though_the_last_report_has_none(tmp_path: Path) -> None:
    """A worker that is killed reports where it was, and no figures."""
    now = [1.0]
    with open(tmp_path / events.EVENTS_FILE, "wb", 0) as file:
        recorder = JobRecorder(file, clock=lambda: now[0])
        begin(recorder, events.FIXED)
        now[0] = 10.0
        recorder.task_reported("worker/0", 0, report(87, samples=870))
        now[0] = 10.6
        recorder.task_reported("worker/0", 0, report(90, samples=900))
        recorder.task_reported("worker/0", 0, TaskReport("evaluate", None, None, 0.0))
        recorder.task_exited(WorkerExit(0, "worker/0", "host", 10, -9, 0))
    view = read_view(tmp_path)
    assert (view.steps, view.samples, view.members["worker/0"].phase) == (90, 900, "evaluate")


def test_an_epoch_ends_after_its_steps(tmp_path: Path) -> None:
    now = [1.0]
    with open(tmp_path / events.EVENTS_FILE, "wb", 0) as file:
        recorder = JobRecorder(file, clock=lambda: now[0])
        begin(recorder, events.FIXED)
        now[0] = 10.0
        recorder.task_reported("worker/0", 0, report(27, logs={"loss": 2.0}))
        now[0] = 10.1
        recorder.task_reported(
            "worker/0", 0, report(30, logs={"loss": 1.5}, finished_epoch=FinishedEpoch(0, {"loss": 1.0}))
        )
    for view in (recorder.view, read_view(tmp_path)):
        assert (view.steps, view.epochs[-1].step, view.logs) == (30, 30, {"loss": 1.0})


def test_a_task_that_was_stopped_leaves_no_traceback_and_has_not_failed() -> None:
    recorder = JobRecorder()
    begin(recorder)
    stopped = CrashReport("PreemptedError", "asked to stop", "Traceback: ...", code=75)
    interrupted = CrashReport("KeyboardInterrupt", "", "Traceback: ...", interrupted=True)
    for rank, (code, error) in enumerate([(75, stopped), (130, interrupted)]):
        end = WorkerExit(
            rank, f"worker/{rank}", "host", 10 + rank, code, rank, diagnostics=WorkerDiagnostics(error=error)
        )
        recorder.job_failed(end)
        recorder.task_exited(end)
    assert [recorder.output_of(task) for task in TASKS] == ["", ""]
    assert not [item for item in recorder.view.feed if "failed with exit code 75" in item.text]


def test_a_failure_page_names_the_files_that_are_there(tmp_path: Path) -> None:
    page = "why\n\nThe whole output of each task, and this report as failure.txt and failure.json: d\n"
    assert without_missing_files(page, tmp_path).endswith("The whole output of each task: d\n")
    for name in ("failure.txt", "failure.json"):
        (tmp_path / name).touch()
    assert without_missing_files(page, tmp_path) == page


def test_epochs_and_checkpoints_are_events_of_their_own() -> None:
    recorder = JobRecorder()
    begin(recorder)
    epoch, checkpoint = FinishedEpoch(0, {"val_loss": 1.0}), SavedCheckpoint(5, "/there")
    for steps in (5, 6):
        for rank, task in enumerate(TASKS):
            found = {"checkpoint": checkpoint} if rank == 0 else {}
            recorder.task_reported(task, rank, report(steps, finished_epoch=epoch, **found))
    assert [point.epoch for point in recorder.view.epochs] == [0]
    assert [saved.path for saved in recorder.view.checkpoints] == ["/there"]
    assert recorder.view.epochs[0].logs == {"val_loss": 1.0}


def test_an_epoch_is_recorded_once_however_late_others_report_it() -> None:
    recorder = JobRecorder()

    def finish(*reports: tuple[int, int]) -> list[int]:
        before = len(recorder.view.epochs)
        for rank, epoch in reports:
            for _ in range(2):
                finished = FinishedEpoch(epoch, {"loss": float(rank)})
                recorder.task_reported(TASKS[rank], rank, report(1, finished_epoch=finished))
        return [point.epoch for point in recorder.view.epochs[before:]]

    begin(recorder)
    assert finish((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2)) == [0, 1, 2]
    assert finish((0, 0), (0, 1), (1, 0), (1, 2), (0, 2)) == [0, 1, 2], "another fit"
    host = SimpleNamespace(name="a")
    recorder.task_started(SimpleNamespace(task=TASKS[1], spec=SimpleNamespace(rank=1), host=host), 9)  # type: ignore[arg-type]
    assert finish((1, 2), (1, 3), (0, 3)) == [3], "a worker was replaced"
    begin(recorder)
    for rank, task in enumerate(TASKS):
        recorder.task_started(SimpleNamespace(task=task, spec=SimpleNamespace(rank=rank), host=host), 9)  # type: ignore[arg-type]
    assert finish((1, 2), (0, 2), (0, 3), (1, 3)) == [2, 3], "the whole job went back to a checkpoint"


def test_a_clock_that_is_set_back_delays_no_figures(tmp_path: Path) -> None:
    now = [5000.0]
    with open(tmp_path / events.EVENTS_FILE, "wb", 0) as file:
        recorder = JobRecorder(file, clock=lambda: now[0])
        begin(recorder, events.FIXED)
        recorder.task_reported("worker/0", 0, report(1))
        now[0] = 100.0
        recorder.task_reported("worker/0", 0, report(2))
    assert recorder.view.steps == 2
    assert read_view(tmp_path).steps == 2


def test_what_is_no_text_is_shown_escaped(tmp_path: Path) -> None:
    with open(tmp_path / events.EVENTS_FILE, "wb", 0) as file:
        recorder = JobRecorder(file)
        recorder.record(events.CheckpointWritten(1.0, 5, "/l\udcf6g"))
        recorder.record(events.StragglersChanged(1.0, ["\udcf6"]))
    assert [saved.path for saved in recorder.view.checkpoints] == ["/l\\udcf6g"]
    assert msgspec.json.encode(recorder.view)
    assert replay(list(read_events(tmp_path))) == recorder.view


def test_a_full_disk_ends_the_file_and_not_the_job(tmp_path: Path) -> None:
    with open("/dev/full", "wb", 0) as file:
        recorder = JobRecorder(file)
        recorder.message("lost")
        recorder.message("lost too")
    assert recorder.problem == "No space left on device"
    assert len(recorder.view.feed) == 2


def test_a_directory_without_events_is_an_error_that_says_which_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--log-dir"):
        read_view(tmp_path)
    (tmp_path / events.EVENTS_FILE).write_text('{"type": "unheard of"}\n')
    with pytest.raises(ConfigurationError, match="version of Phalanx"):
        read_view(tmp_path)
