from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.runtime import core_affinity


@given(st.integers(1, 200), st.integers(1, 300))
def test_shares_are_even_and_leave_no_core_idle(count: int, workers: int) -> None:
    shares = core_affinity.share_cores(range(100, 100 + count), workers)
    sizes = [len(share) for share in shares]
    assert len(shares) == workers
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert {core for share in shares for core in share} == set(range(100, 100 + count))


@given(st.integers(1, 50), st.integers(1, 50))
def test_with_enough_cores_no_two_workers_share_one(count: int, extra: int) -> None:
    shares = core_affinity.share_cores(range(count + extra), count)
    used = [core for share in shares for core in share]
    assert len(used) == len(set(used)) == count + extra


def test_a_container_quota_limits_the_threads_but_not_below_one() -> None:
    assert core_affinity.thread_count(range(32), 2, None) == 32
    assert core_affinity.thread_count(range(32), 2, 4.0) == 2
    assert core_affinity.thread_count(range(32), 8, 2.0) == 1
    assert core_affinity.thread_count([0], 1, 16.0) == 1


@pytest.mark.parametrize(
    ("content", "quota"), [("max 100000\n", None), ("250000 100000\n", 2.5), ("nonsense", None), ("", None)]
)
def test_the_quota_is_read_as_the_kernel_writes_it(content: str, quota: float | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(content)
    assert core_affinity.core_quota(tmp_path / "cpu.max") == quota


def test_without_a_quota_file_there_is_no_quota(tmp_path: Path) -> None:
    assert core_affinity.core_quota(tmp_path / "missing") is None


def test_the_available_cores_are_those_of_the_affinity() -> None:
    assert set(core_affinity.available_cores()) == os.sched_getaffinity(0)


def test_processes_that_are_started_meanwhile_are_bound_and_the_thread_is_not_afterwards() -> None:
    program = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    before = os.sched_getaffinity(0)
    for cores in ([min(before)], []):
        with core_affinity.children_bound_to(cores):
            output = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True).stdout
        assert output.strip() == str(sorted(cores or before))
        assert os.sched_getaffinity(0) == before
