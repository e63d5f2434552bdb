"""What must hold after a job, whatever went wrong in it. Each check returns what does not hold, in words."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.chaos.faults import FILLER
from tests.chaos.job import MARK, Job

TOLERANCE = 1e-3
DELIVERY_TIMEOUT_S = 15.0
"""For the kernel to take away what the job had, on a busy machine."""
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Result:
    """What a job has made.

    Attributes:
        losses: per epoch, by name.
        ledger: how often each sample was used, per epoch.
    """

    weights: np.ndarray[Any, Any]
    losses: dict[str, list[float]]
    ledger: dict[str, list[int]]

    @classmethod
    def of(cls, job: Job) -> Result | None:
        path = job.lives / "result.json"
        if not path.exists():
            return None
        content = json.loads(path.read_text())
        losses = {name: values for name, values in content["history"].items() if "loss" in name}
        return cls(np.array(content["weights"]), {**losses, "final": [content["loss"][0]]}, content["ledger"])


def violations(job: Job, reference: Result, shared_before: set[str]) -> list[str]:
    """All that does not hold after a job that has ended."""
    return [
        *_ended_well(job),
        *same_model(Result.of(job), reference),
        *_nothing_runs(job),
        *_no_port(job),
        *_nothing_shared(shared_before),
        *_no_file(job),
    ]


def same_model(result: Result | None, reference: Result) -> list[str]:
    """The weights, the losses and the use of the samples are those of an undisturbed job."""
    if result is None:
        return ["there is no result"]
    found = []
    if result.weights.shape != reference.weights.shape:
        found.append(f"{result.weights.shape} weights instead of {reference.weights.shape}")
    elif (apart := float(np.abs(result.weights - reference.weights).max())) > TOLERANCE:
        found.append(f"weights differ by up to {apart:.2g}")
    for name, values in reference.losses.items():
        own = result.losses.get(name, [])
        if len(own) != len(values) or not np.allclose(own, values, rtol=TOLERANCE, atol=TOLERANCE):
            found.append(f"{name} is {own} instead of {values}")
    if result.ledger != reference.ledger or any(counts != [1] for counts in result.ledger.values()):
        found.append(f"samples were used {result.ledger} times")
    return found


def shared_names() -> set[str]:
    """What lies in /dev/shm."""
    return set(os.listdir(SHARED)) if SHARED.is_dir() else set()


def _ended_well(job: Job) -> list[str]:
    return [] if job.code == 0 else [f"exit code {job.code}"]


def _nothing_runs(job: Job) -> list[str]:
    left = _settled(job.processes)
    return [f"processes are left: {left}"] if left else []


def _no_port(job: Job) -> list[str]:
    left = _settled(lambda: sorted(job.ports & _listening()))
    return [f"ports are left: {left}"] if left else []


def _nothing_shared(before: set[str]) -> list[str]:
    # Other jobs of this machine start and end meanwhile, but what they make is gone soon.
    left = _settled(lambda: sorted(name for name in shared_names() - before if name.startswith("phalanx")))
    return [f"/dev/shm has {left}"] if left else []


def _no_file(job: Job) -> list[str]:
    found = []
    if left := sorted(path.name for path in job.temporary.iterdir()):
        found.append(f"temporary files are left: {left}")
    of_the_claim = (".owner", ".lock")
    if left := sorted(p.name for p in job.checkpoints.glob(".*") if p.name != FILLER and p.suffix not in of_the_claim):
        found.append(f"half-written checkpoints are left: {left}")
    entries = list(job.registry.glob("*.json"))
    if len(entries) > job.launchers - 1:  # a launcher that is killed leaves its own; `phalanx status` removes it
        found.append(f"{len(entries)} entries of jobs are left")
    return found


def _listening() -> set[int]:
    """Ports on which processes listen that belong to no other job."""
    found = set()
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and not _is_of_another_job(connection.pid):
            found.add(connection.laddr.port)
    return found


def _is_of_another_job(pid: int | None) -> bool:
    """A port that became free may have been taken by whatever else runs here."""
    if pid is None:
        return False
    try:
        return MARK not in psutil.Process(pid).environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return True


def _settled(left: Callable[[], Any]) -> Any:
    """What is still left after a while."""
    until = time.monotonic() + DELIVERY_TIMEOUT_S
    while (found := left()) and time.monotonic() < until:
        time.sleep(0.1)
    return found
