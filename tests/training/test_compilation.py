"""Steps that are compiled beside the training, for parts of batches that a loss would bring."""

from __future__ import annotations

from tests.support.backends import FIRST
from tests.support.programs import check_python

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


def test_the_end_of_the_program_waits_for_what_is_being_compiled_and_leaves_out_the_rest() -> None:
    assert check_python("-c", PROGRAM, backend=FIRST).split() == ["first"]
