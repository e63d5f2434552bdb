"""Runs programs as a reader would: from the repository's folder, with output to a fresh folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support import fork_server, programs
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import ROOT, finish

EXAMPLES = ROOT / "examples"
JOB_BOUND_S = 300.0
"""Against hanging only, on a machine with other work; the longest takes 15 s on two free cores."""

Run = Callable[..., str]


def environment(backend: str) -> dict[str, str]:
    """What a reader's shell would have: nothing of a job that this test may be part of itself."""
    return {
        **programs.environment(backend),
        # The interpreter of the tests, for commands that say `python`.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "COLUMNS": "200",
        # A rank that waits for a missing one must say so long before the test's own bound.
        "PHALANX_TIMEOUT": "60",
        "PHALANX_RENDEZVOUS_TIMEOUT": "90",
    }


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("examples/digits.py", ..., workers=2, backend="jax")`: its output; it must end with exit code 0.

    `workers=None` runs it as plain `python`. The program finds the examples, and writes where it likes.
    """
    (tmp_path / "examples").symlink_to(EXAMPLES)

    def run(
        *arguments: object,
        backend: str = FIRST,
        workers: int | None = None,
        more: Mapping[str, str] | None = None,
    ) -> str:
        phalanx = [] if workers is None else ["-m", "phalanx", "run", "--workers", str(workers)]
        command = [sys.executable, *phalanx, *map(str, arguments)]
        variables = {**environment(backend), **(more or {})}
        code, output = finish(command, variables, folder=tmp_path, bound_s=JOB_BOUND_S, start=fork_server.popen)
        assert code is not None, f"{command} did not end within {JOB_BOUND_S:g} s:\n{output}"
        assert code == 0, f"{command} ended with {code}:\n{output}"
        return output

    return run


def each_backend(*of: str, slow_after_the_first: bool = False) -> pytest.MarkDecorator:
    """Run a test once for each of these backends (all, if none is named) that BACKENDS asks for."""
    parameters = []
    for name in of or ("jax", "tensorflow", "torch"):
        marks = [
            getattr(pytest.mark, name),
            pytest.mark.skipif(name not in BACKENDS, reason=f"BACKENDS leaves out {name}"),
        ]
        if slow_after_the_first and name != FIRST:
            marks.append(pytest.mark.slow)
        parameters.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("backend", parameters)
