"""Divides the host's cores among its workers.

Two local replicas that each use every core are slower than one, so every worker is bound to its own cores.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def share_cores(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Divide `cores` into one share for each worker.

    The shares are contiguous and differ by at most one core. With more workers than cores, each worker gets one core,
    which neighboring workers share.
    """
    count = len(cores)
    if workers <= count:
        return [tuple(cores[i * count // workers : (i + 1) * count // workers]) for i in range(workers)]
    return [(cores[i * count // workers],) for i in range(workers)]


def thread_count(share: Sequence[int], workers: int, quota: float | None) -> int:
    """Number of compute threads for a worker with this share.

    Args:
        workers: Number of workers on this host.
        quota: Number of cores that the whole container may use (it may see 64 and be allowed 2); None for no limit.
    """
    if quota is None:
        return len(share)
    return max(1, min(len(share), math.ceil(quota / workers)))


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The cores that one worker is bound to, and its number of compute threads."""

    cores: tuple[int, ...]
    threads: int


def host_shares(workers: int) -> list[CoreShare]:
    """The shares of this host's workers."""
    quota = core_quota()
    shares = share_cores(available_cores(), workers)
    return [CoreShare(share, thread_count(share, workers, quota)) for share in shares]


def available_cores() -> list[int]:
    """Cores that this process may run on, with the hardware threads of each physical core adjacent.

    A contiguous share then consists of whole physical cores instead of halves of twice as many.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS has no affinity; the count still sizes the thread pools
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0), key=lambda core: (_physical_core(core), core))


def core_quota(cpu_max: Path = CGROUP_CPU_MAX) -> float | None:
    """Number of cores that the control group grants (cgroup v2 `cpu.max`: "quota period" in microseconds), or None."""
    try:
        quota, period = cpu_max.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):  # not Linux, cgroup v1, or not mounted: no known quota
        return None


def bind(cores: Sequence[int]) -> None:
    """Bind this process and all its running threads to `cores`; threads started later inherit it."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cores)
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), cores)
            except ProcessLookupError:  # the thread has ended
                continue
    except OSError:
        # Forbidden by a sandbox, or the cores are no longer available: slower, but correct.
        return


@contextlib.contextmanager
def children_bound_to(cores: Sequence[int]) -> Iterator[None]:
    """Bind processes that this thread starts inside the block to `cores`; does nothing if `cores` is empty."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)  # the calling thread's, which its children inherit
    with contextlib.suppress(OSError):  # as in `bind`
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _physical_core(core: int) -> tuple[int, int]:
    folder = CPU_TOPOLOGY / f"cpu{core}" / "topology"
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, core
