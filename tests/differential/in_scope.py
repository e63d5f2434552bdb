"""A pytest plugin that runs tests of Keras itself in a strategy's scope, and writes down what became of them.

    phalanx run -n 2 -m pytest -p tests.differential.in_scope --outcomes FOLDER --pyargs keras.src.trainers.trainer_test

Every rank runs every test, on the same random numbers. `tests.differential.keras_tests` compares the outcomes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.differential.keras_tests import PLAIN
from tests.support.outcomes import OutcomeWriter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="folder for RANK.json, or plain.json")
    parser.addoption("--plain", action="store_true", help="without a strategy")


def pytest_configure(config: pytest.Config) -> None:
    strategy = None
    if not config.getoption("plain"):
        import phalanx

        strategy = phalanx.MultiWorkerMirroredStrategy()
    name = f"{PLAIN if strategy is None else strategy.rank}.json"
    config.pluginmanager.register(OutcomeWriter(config.getoption("outcomes") / name))
    config.pluginmanager.register(_Session(strategy))


class _Session:
    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        keras.utils.set_random_seed(1)  # some tests draw their data, and every rank must train on the same
        with contextlib.nullcontext() if self._strategy is None else self._strategy.scope():
            yield
