"""Facts about this machine that matter for training. Reads files and metadata; imports no backend."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.software_versions import version_of
from phalanx.devices.gpu_count import count_gpus
from phalanx.runtime.core_affinity import available_cores, core_quota

PACKAGES = (
    *("phalanx", "keras", "numpy", "jax", "jaxlib", "tensorflow", "tensorflow-cpu", "torch"),
    *("msgspec", "rich-click", "cloudpickle", "rich", "cryptography"),
)
SHARED_MEMORY = Path("/dev/shm")
CGROUP_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about a machine. Sizes are in bytes; None if unknown.

    Attributes:
        system: Operating system and processor.
        python: Version and path of this interpreter.
        packages: Versions of relevant installed packages.
        cores: Number of cores that this process may run on.
        quota: Number of cores that the container grants; None without a limit.
        memory, free_memory: Memory of the machine, or of the container if its limit is lower.
        shared_memory: Free space in /dev/shm; None if it is not writable.
        descriptors: Soft and hard limit of open files; -1 for none.
        gpus: Models of the GPUs that this process may use; `GPU` if the driver does not name them.
    """

    system: str
    python: str
    packages: Mapping[str, str]
    cores: int
    quota: float | None
    memory: int | None
    free_memory: int | None
    shared_memory: int | None
    descriptors: tuple[int, int]
    gpus: tuple[str, ...]


def describe_machine(environment: Mapping[str, str]) -> Machine:
    """Collect the facts about this machine.

    Args:
        environment: Environment variables; only CUDA_VISIBLE_DEVICES matters.
    """
    memory, free = _memory()
    models = gpu_models()
    count = count_gpus(environment)
    return Machine(
        system=f"{_distribution()}, {platform.system()} {platform.release()}, {platform.machine()}",
        python=f"{platform.python_version()} ({sys.executable})",
        packages={package: version for package in PACKAGES if (version := version_of(package))},
        cores=len(available_cores()),
        quota=core_quota(),
        memory=memory,
        free_memory=free,
        shared_memory=_free_shared_memory(),
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE),
        gpus=models if count == len(models) else ("GPU",) * count,
    )


def gpu_models(driver: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """Models of all NVIDIA GPUs, as listed by the driver."""
    models = []
    for path in sorted(driver.glob("*/information")):
        lines = path.read_text().splitlines()
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return tuple(models)


def describe_quota(machine: Machine) -> str:
    """Text about the quota, to follow the number of cores in a sentence; empty without a limit."""
    return "" if machine.quota is None else f", of which the container grants {machine.quota:g}"


def as_gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.3g} GiB"


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:  # not Linux, or a container without the file
        return platform.platform(terse=True)


def _memory() -> tuple[int | None, int | None]:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None, None
    try:
        limit = int(CGROUP_MEMORY_MAX.read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return total, free
    return min(total, limit), min(free, limit)


def _free_shared_memory() -> int | None:
    if not os.access(SHARED_MEMORY, os.W_OK):
        return None
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize
