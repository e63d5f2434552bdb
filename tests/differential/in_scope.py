"""A pytest plugin that runs tests of Keras itself in a strategy's scope, and writes down what became of them.

    phalanx run -n 2 -m pytest -p tests.differential.in_scope --outcomes FOLDER --pyargs keras.src.trainers.trainer_test

Every rank runs every test, on the same random numbers. `tests.differential.keras_tests` compares the outcomes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.differential.keras_tests import PLAIN


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="folder for RANK.json, or plain.json")
    parser.addoption("--plain", action="store_true", help="without a strategy")


def pytest_configure(config: pytest.Config) -> None:
    strategy = None
    if not config.getoption("plain"):
        import phalanx

        strategy = phalanx.MultiWorkerMirroredStrategy()
    config.pluginmanager.register(_Session(config.getoption("outcomes"), strategy))


class _Session:
    def __init__(self, folder: Path, strategy: Any) -> None:
        self._strategy = strategy
        self._path = folder / f"{PLAIN if strategy is None else strategy.rank}.json"
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        keras.utils.set_random_seed(1)  # some tests draw their data, and every rank must train on the same
        with contextlib.nullcontext() if self._strategy is None else self._strategy.scope():
            yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The outcome: "passed", "skipped", or the last line of the error."""
        if report.when == "call" or not report.passed:
            error = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
            self._outcomes[report.nodeid.rpartition("::")[2]] = error if report.failed else report.outcome

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._outcomes))
