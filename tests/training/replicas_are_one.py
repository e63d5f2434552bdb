"""Tests one scenario: the ranks agree with each other and with plain Keras."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.support.backends import BACKENDS, FIRST
from tests.training.compare import assert_close
from tests.training.conftest import FindingsOf
from tests.training.scenarios.registry import Scenario, Table

WORLDS = (2, 3)
BOUND_S = 3600
"""Limit for hanging jobs. The first test of a job runs it for all tests."""


def cases(table: Table) -> list[Any]:
    """Return the parameters (backend, world_size, scenario) of all tests for the backends of the environment."""
    found = []
    for backend in BACKENDS:
        for world_size in WORLDS:
            for scenario in table.values():
                if _runs(scenario, backend, world_size):
                    marks = [
                        getattr(pytest.mark, backend),
                        *([pytest.mark.slow] if scenario.is_slow(backend, world_size, FIRST) else []),
                    ]
                    if missing := [module for module in scenario.needs if not importlib.util.find_spec(module)]:
                        marks.append(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))
                    name = f"{backend}-{world_size}-{scenario.name}"
                    found.append(pytest.param(backend, world_size, scenario.name, marks=marks, id=name))
    return found


def _runs(scenario: Scenario, backend: str, world_size: int) -> bool:
    return backend in scenario.backends and world_size in scenario.worlds


def assert_replicas_are_one(scenario: Scenario, backend: str, world_size: int, findings: FindingsOf) -> None:
    ranks = findings(backend, world_size).of(scenario.name)
    if scenario.error is not None:
        kind, text = scenario.error[backend]
        for rank, found in enumerate(ranks):
            assert "error" in found, f"rank {rank} raised nothing"
            assert found["error"][0] == kind, found["error"][2]
            assert text in found["error"][1], found["error"][1]
        return
    values = [_value(found, f"rank {rank}") for rank, found in enumerate(ranks)]
    for rank, value in enumerate(values):
        assert_close(_shared(value), _shared(values[0]), 0.0, f"rank {rank}")
    if scenario.has_reference:
        plain = _value(findings(backend, 1).of(scenario.name)[0], "plain Keras")
        assert_close(_shared(values[0]), _shared(plain), scenario.tolerance)


def _value(found: dict[str, Any], who: str) -> dict[str, Any]:
    if "error" in found:
        pytest.fail(f"{who}: {found['error'][2]}")
    return found["value"]  # type: ignore[no-any-return]


def shared_values(found: dict[str, Any], who: str) -> dict[str, Any]:
    """Return the findings of a process that must be equal on all ranks. Fail the test if the process raised instead."""
    return _shared(_value(found, who))


def _shared(value: dict[str, Any]) -> dict[str, Any]:
    """Return the values that must be equal on all ranks."""
    return {key: item for key, item in value.items() if not key.startswith("own_")}
