"""What became of the tests that the processes of a job ran, each all of them, and what should have."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest

Outcomes = dict[str, str]
"""By test: "passed", "skipped" or the error."""


class OutcomeWriter:
    """A pytest plugin that writes the outcomes of a process at the end.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._outcomes: Outcomes = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note an outcome; of a test with subtests, the first one that failed."""
        if report.when == "call" or not report.passed:
            name = report.nodeid.rpartition("::")[2]
            error = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
            if self._outcomes.get(name, "passed") in ("passed", "skipped"):
                self._outcomes[name] = error if report.failed else report.outcome

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._outcomes))


def count(outcomes: Outcomes) -> str:
    """How many there are of each kind."""
    passed, skipped = (list(outcomes.values()).count(kind) for kind in ("passed", "skipped"))
    return f"{passed} passed, {skipped} skipped, {len(outcomes) - passed - skipped} failed"


def read(folder: Path, processes: Iterable[str], log: Path) -> dict[str, Outcomes]:
    """The outcomes of each process, from files named after them.

    Raises: SystemExit with the end of the log, if a process did not write its file.
    """
    found = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    if missing := set(processes) - set(found):
        sys.exit(f"{sorted(missing)} did not finish:\n{log.read_text()[-3000:]}")
    return found


def are_as_listed(failed: Mapping[str, str], expected: Collection[str]) -> bool:
    """Whether just the expected tests failed; prints those that did, with their errors, and those that did not."""
    for name, error in failed.items():
        print(f"  {'expected' if name in expected else 'FAILED'}: {name}: {error.strip().splitlines()[0][:300]}")
    for name in set(expected) - set(failed):
        print(f"  PASSED, though it is listed: {name}")
    return set(failed) == set(expected)
