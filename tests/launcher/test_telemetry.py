"""What a process says of its own figures."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from phalanx.devices import gpu_figures
from phalanx.launcher.hosts.worker_files import WorkerFiles
from phalanx.monitoring.worker_figures import FinishedEpoch, GpuFigures, WorkerFigures
from phalanx.runtime import progress, telemetry
from phalanx.runtime.telemetry import Telemetry
from phalanx.runtime.traffic_account import Traffic, TrafficAccount


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """The time, to be set; and a launcher that reads."""
    record = tmp_path / "record"
    record.write_bytes(progress.blank())
    monkeypatch.setattr(progress, "_reporter", progress._Reporter(str(record)))
    clock = [100.0]
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: clock[0])
    return clock


def test_steps_count_over_epochs_that_are_shorter_than_a_beat(now: list[float]) -> None:
    own = Telemetry()
    for epoch in range(5):
        for step in range(20):
            progress.report("gradients", epoch=epoch, step=step)
            progress.enter("all_reduce")
    progress.report("evaluate")
    assert own.collect().steps == 100


def test_time_is_computing_or_waiting_and_the_job_may_be_joined_again(now: list[float]) -> None:
    own, waited = Telemetry(), [5.0]
    own.traffic.watch(lambda: Traffic(10, 3, waited[0]))
    now[0] += 2.0
    own.collect()  # what was waited before it was watched counts too, as far as it fits
    now[0] += 1.0
    waited[0] += 0.25
    figures = own.collect()
    assert (figures.computed_s, figures.waited_s, figures.bytes_sent, figures.bytes_on_links) == (0.75, 2.25, 10, 3)
    waited[0] = 0.0  # another communicator
    own.traffic.watch(None)
    now[0] += 1.0
    figures = own.collect()
    assert (figures.computed_s, figures.bytes_sent, figures.bytes_on_links) == (1.75, 10, 3)
    own.traffic.watch(lambda: Traffic(2, 1, waited[0]))
    figures = own.collect()
    assert (figures.bytes_sent, figures.bytes_on_links) == (12, 4)


def test_what_was_sent_just_before_a_process_leaves_its_job_counts(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Telemetry()
    monkeypatch.setattr(telemetry, "current", own)
    monkeypatch.setattr(telemetry, "_publishing_pid", os.getpid())
    own.traffic.watch(lambda: Traffic(10, 3, 0.5))
    now[0] += 2.0
    telemetry.stop_publishing()
    figures = own.collect()
    assert (figures.bytes_sent, figures.bytes_on_links, figures.waited_s) == (10, 3, 0.5)


def test_imports_and_the_wait_for_the_other_processes_are_no_computing(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Telemetry()
    monkeypatch.setattr(telemetry, "current", own)
    monkeypatch.setattr(telemetry, "_publishing_pid", None)
    monkeypatch.setattr(telemetry.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(telemetry.atexit, "register", lambda function: None)
    now[0] += 60.0
    telemetry.start_publishing()
    now[0] += 1.0
    telemetry.start_publishing()  # it joins again
    now[0] += 1.0
    assert own.collect().computed_s == 2.0


class LeavingAccount(TrafficAccount):
    """Of a process that leaves its job between two looks of the thread that measures."""

    looks = 0

    @property
    def _read(self) -> Any:
        self.looks += 1
        return None if self.looks > 1 else lambda: Traffic(7, 7, 0.0)

    @_read.setter
    def _read(self, value: object) -> None:
        pass


def test_a_process_that_leaves_its_job_while_it_is_measured_is_measured() -> None:
    account = LeavingAccount()
    account.update()
    assert account.bytes_sent == 7


def test_a_fork_that_exits_writes_nothing(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is its parent's, and so is the lock, which may have been held when it was copied."""
    monkeypatch.setattr(telemetry, "_publishing_pid", os.getppid())
    telemetry._write()
    record = progress._get_reporter()._record
    assert record is not None
    assert progress.parse_figures(record[:]) is None


def test_logs_are_asked_for_with_each_beat_and_are_plain_numbers(now: list[float]) -> None:
    own = Telemetry()
    assert not own.are_logs_due  # without a launcher no step is to fetch them
    own.start()
    assert own.are_logs_due  # until the first beat those of every step: a job may die before it
    own.record_logs({"loss": 0.7})
    assert own.are_logs_due
    assert own.collect().logs == {"loss": 0.7}
    assert own.are_logs_due
    logs = {"loss": np.float32(0.5), "auc": np.nan, "per_class": np.zeros(3), "nested": {"a": 1.0}}
    own.record_logs({**logs, "phase": np.array("warm-up"), "since": np.datetime64("2026-01-01")})
    assert not own.are_logs_due
    assert own.collect().logs == {"loss": 0.5, "auc": None}
    own.record_epoch(3, {"val_loss": 2.0})
    assert own.collect().finished_epoch == FinishedEpoch(3, {"val_loss": 2.0})


def test_figures_are_read_as_they_were_written_and_a_checkpoint_can_be_requested(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_bytes(progress.blank())
    worker = progress._Reporter(str(path))
    assert progress.parse_figures(path.read_bytes()) is None
    for steps in (1, 2):
        worker.write_figures(msgspec.msgpack.encode(WorkerFigures(steps=steps, logs={"loss": float("inf")})))
    number, content = progress.parse_figures(path.read_bytes()) or (0, b"")
    assert (number, msgspec.msgpack.decode(content, type=WorkerFigures).steps) == (2, 2)
    worker.write_figures(bytes(progress.RECORD_BYTES))  # too long
    assert (progress.parse_figures(path.read_bytes()) or (0,))[0] == 2
    with open(path, "r+b") as file:
        progress.request_save(file.fileno())
        progress.request_save(file.fileno())
    assert progress._NUMBER.unpack_from(worker._record, progress._SAVE_REQUESTS_OFFSET) == (2,)


def test_figures_that_cannot_be_read_are_left_out_until_others_follow() -> None:
    files = WorkerFiles(b"")
    worker = progress._Reporter(f"/proc/self/fd/{files.progress.fileno()}")
    worker.report("all_reduce")
    worker.write_figures(b"\xc1 parts of two")
    report = files.new_report(0)
    assert report is not None
    assert (report.report.phase, report.report.figures) == ("all_reduce", None)
    worker.write_figures(msgspec.msgpack.encode(WorkerFigures(steps=3)))
    report = files.new_report(0)
    assert report is not None
    assert report.report.figures == WorkerFigures(steps=3)
    files.close()


class Nvml(ModuleType):
    """NVIDIA's library on a host with two GPUs."""

    NVMLError = RuntimeError

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise RuntimeError("no such GPU")
        return index

    def nvmlDeviceGetHandleByUUID(self, identifier: bytes) -> int:
        return {b"GPU-1": 1}[identifier]

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=25 * (handle + 1))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=3, total=8)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H100"


@pytest.mark.parametrize(
    ("visible", "index"), [(None, 0), ("1", 1), ("1,0", 1), ("GPU-1", 1), ("", None), ("-1", None), ("7", None)]
)
def test_the_gpu_of_a_process_is_the_first_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int | None
) -> None:
    library = Nvml("pynvml")
    library.__spec__ = ModuleSpec("pynvml", None)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    gpu_figures._open.cache_clear()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    expected = None if index is None else GpuFigures(index, "H100", 0.25 * (index + 1), 3, 8)
    assert gpu_figures.read() == expected
    gpu_figures._open.cache_clear()


def test_the_memory_of_this_process_is_known() -> None:
    assert telemetry.resident_bytes() > 1_000_000
