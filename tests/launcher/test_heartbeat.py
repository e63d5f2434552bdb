"""What a process says of its own pace."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.runtime import heartbeat, progress


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """The time, to be set; and a launcher that reads."""
    record = tmp_path / "record"
    record.write_bytes(progress.blank())
    monkeypatch.setattr(progress, "_reporter", progress._Reporter(str(record)))
    clock = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    return clock


def test_steps_count_over_epochs_that_are_shorter_than_a_beat(now: list[float]) -> None:
    beat = heartbeat.Heartbeat()
    beat()
    for _ in range(2):
        for epoch in range(5):
            for step in range(20):
                progress.report("gradients", epoch=epoch, step=step)
                progress.enter("all_reduce")
        progress.report("evaluate")
        now[0] += 0.5
        pulse = beat()
        assert pulse.steps == 100
    assert pulse.steps_per_s == 200
    for _ in range(heartbeat.WINDOW):
        now[0] += 0.5
        pulse = beat()
    assert (pulse.steps, pulse.steps_per_s) == (0, 0)


def test_numbers_alone_count_too(now: list[float]) -> None:
    beat = heartbeat.Heartbeat()
    for number in range(7):
        progress.report("all_reduce", step=number)
    assert beat().steps == 7
