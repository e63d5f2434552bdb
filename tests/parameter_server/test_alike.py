"""What no server trains is the chief's on all workers, and a `fit` ends for all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parameter_server.alike_program import FEATURES, STOPS_AFTER
from tests.parameter_server.tasks import Tasks
from tests.support.backends import slow_after_the_first

pytestmark = [pytest.mark.parametrize("backend", slow_after_the_first()), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both workers of a job on a backend found."""
    finished: dict[str, list[dict[str, Any]]] = {}

    def of(backend: str) -> list[dict[str, Any]]:
        if backend not in finished:
            folder = tmp_path_factory.mktemp(backend)
            program = ["-m", "tests.parameter_server.alike_program", str(folder)]
            with Tasks(folder, program, servers=2, workers=2, backend=backend) as tasks:
                codes = tasks.ends()
                assert set(codes.values()) == {0}, f"{codes}\n{tasks.everything()}"
                assert "are in a later one; continuing there" in tasks.said("worker/1")
            files = [Path(folder, f"{rank}.json") for rank in range(2)]
            finished[backend] = [json.loads(file.read_text()) for file in files]
        return finished[backend]

    return of


def test_unseeded_splits_are_the_same(backend: str, found: Any) -> None:
    chief, other = found(backend)
    assert other["split"] == chief["split"] != list(range(100))


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_frozen_weights_are_the_chiefs(backend: str, mode: str, found: Any) -> None:
    for worker in found(backend):
        np.testing.assert_array_equal(worker[mode]["frozen"], np.ones((FEATURES, 4)))


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_workers_drop_other_units(backend: str, mode: str, found: Any) -> None:
    chief, other = found(backend)
    assert chief[mode]["seed"] != other[mode]["seed"]


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_fit_that_is_stopped_ends_for_all(backend: str, mode: str, found: Any) -> None:
    for worker in found(backend):
        assert worker[mode]["epochs"][: STOPS_AFTER + 1] == list(range(STOPS_AFTER + 1))
        assert len(worker[mode]["epochs"]) <= STOPS_AFTER + 2  # the end may come when the next epoch has begun
