"""Scenarios are run by job, not by test: the first test that asks starts the job for all that were selected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.jobs import Findings, run_scenarios
from tests.training.scenarios import SCENARIOS

FindingsOf = Callable[[str, int], Findings]


@pytest.fixture(scope="session")
def findings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FindingsOf:
    """`findings(backend, world_size)`: what the selected scenarios found in such a job, run once."""
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if {"backend", "scenario"} <= parameters.keys():
            names = selected.setdefault(parameters["backend"], [])
            if parameters["scenario"] not in names:
                names.append(parameters["scenario"])
    finished: dict[tuple[str, int], Findings] = {}

    def of(backend: str, world_size: int) -> Findings:
        if (backend, world_size) not in finished:
            names = [n for n in selected[backend] if world_size == 1 or world_size in SCENARIOS[n].worlds]
            folder = Path(tmp_path_factory.mktemp("jobs")) / f"{backend}-{world_size}"
            finished[backend, world_size] = run_scenarios(folder, backend, world_size, names)
        return finished[backend, world_size]

    return of
