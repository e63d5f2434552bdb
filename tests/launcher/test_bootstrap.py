"""What a worker leaves for its launcher when it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.runtime import bootstrap, crash_report


def test_a_later_report_replaces_a_longer_one(tmp_path: Path) -> None:
    """The hook of a program may record an error before the one that ends the process."""
    path = tmp_path / "error"
    with open(path, "w+b") as file:
        reporter = bootstrap._CrashReporter(file.fileno())
        assert reporter.record(ValueError("long " * 100))
        assert reporter.record(KeyError("short"))
        report = crash_report.parse(path.read_bytes())
        assert report is not None
        assert (report.kind, report.message) == ("KeyError", "'short'")
        reporter.record_success()
        assert path.read_bytes() == bootstrap.NO_ERROR


def test_a_report_of_which_a_part_is_written_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker then prints the error itself."""
    real = os.pwrite
    with open(tmp_path / "error", "w+b") as file:
        reporter = bootstrap._CrashReporter(file.fileno())
        monkeypatch.setattr(os, "pwrite", lambda fd, content, at: real(fd, content[: len(content) // 2], at))
        assert not reporter.record(ValueError("of which the disk has taken a half"))
