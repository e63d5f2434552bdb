"""Memory that was freed is not asked for again from the system, page by page."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource

from phalanx.arrays.allocation import keep_freed_memory


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        block = bytearray(16 * 1024**2)
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds are glibc's")
@pytest.mark.parametrize("own", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}], ids=["default", "the user's own"])
def test_freed_blocks_are_taken_again_without_page_faults(own: dict[str, str]) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**clean, **own},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    before, after = map(int, done.stdout.split())
    assert before > 1000
    assert after > 1000 if own else after < 10
