"""The interface of `tf.distribute.Strategy`, checked by every rank of a job; what each checks is in `table.py`."""

from __future__ import annotations

import pytest

from tests.strategies.table import SCENARIOS
from tests.training.conftest import FindingsOf
from tests.training.replicas_are_one import BOUND_S, assert_replicas_are_one, cases

TABLE = "tests.strategies.table"


@pytest.mark.timeout(BOUND_S)
@pytest.mark.parametrize(("backend", "world_size", "scenario"), cases(SCENARIOS))
def test_interface(backend: str, world_size: int, scenario: str, findings: FindingsOf) -> None:
    assert_replicas_are_one(SCENARIOS[scenario], backend, world_size, findings)
