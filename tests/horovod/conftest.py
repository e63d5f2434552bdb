"""Jobs of several ranks that run all cases of a framework: one start for many of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.commands import finish
from tests.support.programs import environment

CASES = Path(__file__).parent / "cases"
BOUND_S = 350.0
"""Against hanging; a job of 35 cases takes a good part of it on a machine that is five times slower."""

Outcome = dict[str, list[str]]
"""The traceback of each rank by case; empty if it went well."""


def names_of(framework: str) -> list[str]:
    """The cases of a framework, in order, without importing it."""
    return re.findall(r"^def (check_\w+)", (CASES / f"{framework}.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, int], tuple[Outcome, str]]:
    """`outcomes(framework, backend, world_size)`: how the selected cases ended, and what the job printed."""
    selected: dict[tuple[str, str, int], list[str]] = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if {"framework", "backend", "world_size", "case"} <= parameters.keys():
            job = parameters["framework"], parameters["backend"], parameters["world_size"]
            selected.setdefault(job, []).append(parameters["case"])
    known: dict[tuple[str, str, int], tuple[Outcome, str]] = {}

    def of(framework: str, backend: str, world_size: int) -> tuple[Outcome, str]:
        key = framework, backend, world_size
        if key not in known:
            folder = tmp_path_factory.mktemp(f"{framework}-{backend}-{world_size}")
            known[key] = _run(*key, folder, selected[key])
        return known[key]

    return of


def _run(framework: str, backend: str, world_size: int, folder: Path, names: list[str]) -> tuple[Outcome, str]:
    run = [sys.executable, "-m", "phalanx", "run", "-np", str(world_size)]
    code, output = finish(
        [*run, "-m", "tests.horovod.worker", framework, str(folder), *names],
        environment(backend) | {"PHALANX_TIMEOUT": "60"},
        bound_s=BOUND_S,
        start=fork_server.popen,
    )
    found: Outcome = {}
    for name in names:
        paths = [folder / f"{name}.{rank}" for rank in range(world_size)]
        if all(path.exists() for path in paths):
            found[name] = [path.read_text() for path in paths]
    return found, f"{output}\nexit code {code}"
