"""One compiled program on several devices of one process: the real thing, on CPU devices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.commands import finish
from tests.support.programs import environment

BOUND_S = 250.0

pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]


def test_what_devices_hold(tmp_path: Path) -> None:
    code, output = finish(
        [sys.executable, "-m", "tests.engines.spmd_program"],
        environment("jax"),
        bound_s=BOUND_S,
        start=fork_server.popen,
    )
    assert code == 0, output[-5000:]
