"""Compares the outcomes of tests with the expected ones. Each process of a job runs all tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest

Outcomes = dict[str, str]
"""Outcome by test: "passed", "skipped" or the error."""


class OutcomeWriter:
    """A pytest plugin that writes the outcomes of a process at the end.

    Args:
        path: File to write.
    """

    def __init__(self, path: Path):
        self._path = path
        self._outcomes: Outcomes = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record an outcome; for a test with subtests, the first failure."""
        if report.when == "call" or not report.passed:
            name = report.nodeid.rpartition("::")[2]
            error = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
            if self._outcomes.get(name, "passed") in ("passed", "skipped"):
                self._outcomes[name] = error if report.failed else report.outcome

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._outcomes))


def count(outcomes: Outcomes) -> str:
    """Describe how many outcomes there are of each kind."""
    passed, skipped = (list(outcomes.values()).count(kind) for kind in ("passed", "skipped"))
    return f"{passed} passed, {skipped} skipped, {len(outcomes) - passed - skipped} failed"


def read(folder: Path, processes: Iterable[str], log: Path) -> dict[str, Outcomes]:
    """Read the outcomes of each process from files named after the processes.

    Raises: SystemExit with the end of the log if a process did not write its file.
    """
    found = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    if missing := set(processes) - set(found):
        sys.exit(f"{sorted(missing)} did not finish:\n{log.read_text()[-3000:]}")
    return found


def are_as_listed(failed: Mapping[str, str], expected: Collection[str]) -> bool:
    """Return whether exactly the expected tests failed. Print tests that failed, with their errors, and those that did
    not."""
    for name, error in failed.items():
        print(f"  {'expected' if name in expected else 'FAILED'}: {name}: {error.strip().splitlines()[0][:300]}")
    for name in set(expected) - set(failed):
        print(f"  PASSED, though it is listed: {name}")
    return set(failed) == set(expected)
