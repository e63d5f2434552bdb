"""Scenarios are run by job, not by test: the first test that asks starts the job for all that were selected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.jobs import Findings, run_scenarios

FindingsOf = Callable[[str, int], Findings]


@pytest.fixture(scope="module")
def findings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FindingsOf:
    """`findings(backend, world_size)`: what the selected scenarios found in such a job, run once.

    The test module has SCENARIOS, and TABLE: the name of the module that a worker finds them in.
    """
    scenarios = request.module.SCENARIOS
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.module is request.module and {"backend", "scenario"} <= parameters.keys():
            names = selected.setdefault(parameters["backend"], [])
            if parameters["scenario"] not in names:
                names.append(parameters["scenario"])
    base = Path(tmp_path_factory.mktemp("jobs"))
    finished: dict[tuple[str, int], Findings] = {}

    def of(backend: str, world_size: int) -> Findings:
        if (backend, world_size) not in finished:
            names = [
                name
                for name in selected[backend]
                if (scenarios[name].has_reference if world_size == 1 else world_size in scenarios[name].worlds)
            ]
            folder = base / f"{backend}-{world_size}"
            finished[backend, world_size] = run_scenarios(folder, request.module.TABLE, backend, world_size, names)
        return finished[backend, world_size]

    return of
