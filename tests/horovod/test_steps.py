"""An update is a step for the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.horovod import step_reports
from phalanx.runtime import progress
from phalanx.runtime.telemetry import Telemetry


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress"
    path.write_bytes(progress.blank())
    monkeypatch.setattr(progress, "_reporter", progress._Reporter(str(path)))
    return path


def test_each_merge_is_told_as_a_step_and_what_it_waited_is_known(record: Path) -> None:
    before_s = step_reports.reduction_wait_seconds()
    told = []
    for _ in range(3):
        assert step_reports.report_reduction(lambda: "merged") == "merged"
        last = progress.parse(record.read_bytes())
        assert last is not None
        told.append(last.step)
    assert told == [told[0], told[0] + 1, told[0] + 2]
    assert last is not None
    assert (last.epoch, last.step) == (None, told[-1])
    assert Telemetry().collect().steps == 3
    assert step_reports.reduction_wait_seconds() > before_s


def test_a_merge_that_waits_is_told_before_it_begins(record: Path) -> None:
    during = step_reports.report_reduction(lambda: progress.parse(record.read_bytes()))
    assert during is not None
    assert during.phase == "all_reduce"
