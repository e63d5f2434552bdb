"""An update is a step for the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.horovod import step_reports
from phalanx.runtime import heartbeat, progress


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress"
    path.write_bytes(progress.blank())
    monkeypatch.setattr(progress, "_reporter", progress._Reporter(str(path)))
    return path


def test_each_merge_is_told_as_a_step_and_the_heartbeat_tells_the_speed(record: Path) -> None:
    beat = heartbeat.Heartbeat()
    told = []
    for _ in range(3):
        assert step_reports.report_reduction(lambda: "merged") == "merged"
        last = progress.parse(record.read_bytes())
        assert last is not None
        told.append(last.step)
        pulse = beat()
    assert told == [told[0], told[0] + 1, told[0] + 2]
    assert (pulse.phase, pulse.epoch, pulse.step) == ("update", None, told[-1])
    assert pulse.steps_per_s > 0


def test_a_merge_that_waits_is_told_before_it_begins(record: Path) -> None:
    during = step_reports.report_reduction(lambda: progress.parse(record.read_bytes()))
    assert during is not None
    assert during.phase == "all_reduce"
