"""N replicas train the model that one process of plain Keras trains: history, weights, `evaluate` and `predict`.

One test for each scenario (`scenarios/`), backend and job size; `pytest -k NAME` runs one scenario alone.
"""

from __future__ import annotations

import pytest

from tests.training.conftest import FindingsOf
from tests.training.replicas_are_one import BOUND_S, assert_replicas_are_one, cases
from tests.training.scenarios import SCENARIOS

TABLE = "tests.training.scenarios"


@pytest.mark.timeout(BOUND_S)
@pytest.mark.parametrize(("backend", "world_size", "scenario"), cases(SCENARIOS))
def test_replicas_are_one(backend: str, world_size: int, scenario: str, findings: FindingsOf) -> None:
    assert_replicas_are_one(SCENARIOS[scenario], backend, world_size, findings)
