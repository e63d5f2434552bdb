"""As `tests.security.fuzz`, but atheris chooses inputs that reach further parts of the Python code.

    python -m tests.security.coverage_fuzz --minutes 60 [--decoder NAME ...]

Needs `pip install atheris`.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["phalanx"]):
    from tests.security import fuzz

    fuzz.targets()  # imports what is still missing


def fuzz_by_coverage(check: fuzz.Checked, seeds: fuzz.Seeds, seconds: float) -> None:
    """Until the time is over, in a process of its own: libFuzzer ends the one that it runs in.

    Raises: AssertionError if an input failed, which that process has printed.
    """
    counted = mmap.mmap(-1, 8)

    def count_and_check(content: bytes) -> None:
        counted[:] = (int.from_bytes(counted[:], "big") + 1).to_bytes(8, "big")
        check(content)

    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds):
            Path(folder, str(number)).write_bytes(seed)
        limits = [f"-max_len={fuzz.MAX_INPUT_BYTES}", f"-timeout={fuzz.SLOW_S}", "-verbosity=0"]
        pid = os.fork()
        if pid == 0:
            total = f"-max_total_time={math.ceil(seconds)}"
            atheris.Setup(["fuzz", total, *limits, f"-artifact_prefix={folder}/", folder], count_and_check)
            atheris.Fuzz()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
    check.count = int.from_bytes(counted[:], "big")
    assert not status, f"{check._name}: atheris found an input that fails; it is printed above"


if __name__ == "__main__":
    sys.exit(fuzz.main(fuzz_by_coverage))
