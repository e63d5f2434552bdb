"""Scenarios run per job, not per test: the first test that needs a job starts it for all selected scenarios."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.jobs import Findings, run_scenarios

FindingsOf = Callable[[str, int], Findings]


@pytest.fixture(scope="module")
def findings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FindingsOf:
    """`findings(backend, world_size)`: findings of the selected scenarios in such a job, which runs once.

    The test module has SCENARIOS, and TABLE: the name of the module in which a worker finds them.
    """
    scenarios = request.module.SCENARIOS
    selected: dict[tuple[str, int], dict[str, None]] = {}  # in order, without duplicates
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.module is request.module and {"backend", "world_size", "scenario"} <= parameters.keys():
            backend, name = parameters["backend"], parameters["scenario"]
            selected.setdefault((backend, parameters["world_size"]), {})[name] = None
            if scenarios[name].has_reference:
                selected.setdefault((backend, 1), {})[name] = None
    base = Path(tmp_path_factory.mktemp("jobs"))
    finished: dict[tuple[str, int], Findings] = {}

    def of(backend: str, world_size: int) -> Findings:
        job = (backend, world_size)
        if job not in finished:
            folder = base / f"{backend}-{world_size}"
            finished[job] = run_scenarios(folder, request.module.TABLE, backend, world_size, [*selected[job]])
        return finished[job]

    return of
