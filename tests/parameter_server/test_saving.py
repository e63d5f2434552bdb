"""What the chief saves in the middle of an epoch belongs together: weights, optimizer state and count of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.backends import slow_after_the_first
from tests.support.programs import check_python

PROGRAM = Path(__file__).with_name("saving_program.py")


@pytest.mark.parametrize("mode", ["--synchronous", "--asynchronous"])
@pytest.mark.parametrize("backend", slow_after_the_first())
def test_what_a_callback_saves_between_two_batches_is_of_one_step(backend: str, mode: str) -> None:
    job = ["-m", "phalanx", "run", "--ps", "2", "--workers", "2", str(PROGRAM), mode]
    output = check_python(*job, backend=backend, bound_s=200)
    assert "saved 4 times" in output if mode == "--synchronous" else "saved" in output
