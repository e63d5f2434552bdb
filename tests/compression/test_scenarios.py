"""Compressed, accumulated and periodic training against plain re-computations in one process.

One test for each scenario (`scenarios.py`), backend and job size; `pytest -k NAME` runs one scenario alone.
"""

from __future__ import annotations

import pytest

from tests.compression.scenarios import SCENARIOS
from tests.training.conftest import FindingsOf
from tests.training.replicas_are_one import BOUND_S, assert_replicas_are_one, cases

TABLE = "tests.compression.scenarios"


@pytest.mark.timeout(BOUND_S)
@pytest.mark.parametrize(("backend", "world_size", "scenario"), cases(SCENARIOS))
def test_communicates_less(backend: str, world_size: int, scenario: str, findings: FindingsOf) -> None:
    assert_replicas_are_one(SCENARIOS[scenario], backend, world_size, findings)
