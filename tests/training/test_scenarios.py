"""N replicas train the model that one process of plain Keras trains: history, weights, `evaluate` and `predict`.

One test for each scenario (`scenarios/`), backend and job size; `pytest -k NAME` runs one scenario alone.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from tests.training.compare import assert_close
from tests.training.conftest import FindingsOf
from tests.training.scenarios import SCENARIOS, Scenario

WORLDS = (2, 3)
# The first test of a job runs it for all.
BOUND_S = 900


def _cases() -> list[Any]:
    cases = []
    for backend in os.environ.get("BACKENDS", "jax tensorflow torch").split():
        for world_size in WORLDS:
            for scenario in SCENARIOS.values():
                if _runs(scenario, backend, world_size):
                    marks = [pytest.mark.slow] if scenario.slow else []
                    cases.append(
                        pytest.param(
                            backend,
                            world_size,
                            scenario.name,
                            marks=[getattr(pytest.mark, backend), *marks],
                            id=f"{backend}-{world_size}-{scenario.name}",
                        )
                    )
    return cases


def _runs(scenario: Scenario, backend: str, world_size: int) -> bool:
    return (
        backend in scenario.backends
        and world_size in scenario.worlds
        and all(importlib.util.find_spec(module) for module in scenario.needs)
    )


@pytest.mark.timeout(BOUND_S)
@pytest.mark.parametrize(("backend", "world_size", "scenario"), _cases())
def test_replicas_are_one(backend: str, world_size: int, scenario: str, findings: FindingsOf) -> None:
    entry = SCENARIOS[scenario]
    ranks = findings(backend, world_size).of(scenario)
    if entry.error is not None:
        kind, text = entry.error[backend]
        for rank, found in enumerate(ranks):
            assert "error" in found, f"rank {rank} raised nothing"
            assert found["error"][0] == kind, found["error"][2]
            assert text in found["error"][1], found["error"][1]
        return
    values = [_value(found, f"rank {rank}") for rank, found in enumerate(ranks)]
    for rank, value in enumerate(values):
        assert_close(_shared(value), _shared(values[0]), 0.0, f"rank {rank}")
    if entry.plain:
        plain = _value(findings(backend, 1).of(scenario)[0], "plain Keras")
        assert_close(values[0], plain, entry.tolerance)
    elif entry.sizes_agree and world_size != WORLDS[0]:
        other = _value(findings(backend, WORLDS[0]).of(scenario)[0], f"{WORLDS[0]} ranks")
        assert_close(values[0], other, entry.tolerance)


def _value(found: dict[str, Any], who: str) -> dict[str, Any]:
    if "error" in found:
        pytest.fail(f"{who}: {found['error'][2]}")
    return found["value"]  # type: ignore[no-any-return]


def _shared(value: dict[str, Any]) -> dict[str, Any]:
    """What must be the same on all ranks."""
    return {key: item for key, item in value.items() if not key.startswith("own_")}
