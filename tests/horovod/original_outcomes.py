"""A pytest plugin for Horovod's own tests on one rank, which writes down what became of them.

phalanx run -n 2 -m pytest -p tests.horovod.original_outcomes --outcomes FOLDER test_torch.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.horovod import horovod_internals
from tests.support.outcomes import OutcomeWriter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="folder for RANK.json")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OutcomeWriter(config.getoption("outcomes") / f"{os.environ['HOROVOD_RANK']}.json"))


def pytest_collection_finish() -> None:
    """Horovod's TensorFlow module shows what its tests then read from it."""
    if (hvd := sys.modules.get("phalanx.horovod.tensorflow")) is not None:
        hvd.util, hvd._executing_eagerly = horovod_internals, horovod_internals._executing_eagerly
        hvd.mpi_ops._basics = horovod_internals._basics
