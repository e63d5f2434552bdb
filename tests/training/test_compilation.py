"""Steps that are compiled beside the training, for parts of batches that a loss would bring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.training.jobs import ROOT, environment

PROGRAM = """
import threading

from phalanx.training.elastic_recovery import compile_in_background

begun = threading.Event()


def first():
    begun.set()
    threading.main_thread().join()  # that is: until the program has come to its end
    print("first")


compile_in_background([first, lambda: print("second")])
begun.wait()
"""


def test_the_end_of_the_program_waits_for_what_is_being_compiled_and_leaves_out_the_rest(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment("jax", tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["first"]), done.stderr
