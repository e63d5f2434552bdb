"""Runs scenarios in real jobs, many scenarios per process start."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.launcher.worker_environment import thread_settings
from tests.support import fork_server
from tests.support.commands import finish
from tests.support.programs import environment

START_BOUND_S = 90.0
SCENARIO_BOUND_S = 30.0
"""Limit for hanging scenarios. A scenario takes about a second on a free core."""


@dataclass
class Findings:
    """Findings of a job.

    Attributes:
        folder: Folder with a pickle per scenario and rank.
        world_size: Number of ranks; 1 for plain Keras.
        output: Output of all its processes, with the exit code.
    """

    folder: Path
    world_size: int
    output: str

    def of(self, scenario: str) -> list[dict[str, Any]]:
        """Return the findings of each rank. AssertionError with the job's output if it did not get that far."""
        found = []
        for rank in range(self.world_size):
            path = self.folder / f"{scenario}.{rank}"
            assert path.exists(), f"rank {rank} did not finish {scenario}; the job said:\n{self.output[-6000:]}"
            found.append(pickle.loads(path.read_bytes()))
        return found


def run_scenarios(
    folder: Path, table: str, backend: str, world_size: int, names: Sequence[str], kind: str = "plain"
) -> Findings:
    """Run scenarios of a table in a job of `world_size` ranks, or for 1 in a process of the worker's `kind`."""
    folder.mkdir(parents=True)
    module = ["-m", "tests.training.worker"]
    if world_size == 1:
        command = [sys.executable, *module, kind, table, str(folder), *names]
    else:
        run = ["-m", "phalanx", "run", "--workers", str(world_size), "--backend", backend]
        command = [sys.executable, *run, *module, "job", table, str(folder), *names]
    bound_s = START_BOUND_S + SCENARIO_BOUND_S * len(names)
    settings = environment(backend)
    if kind == "plain" and world_size == 1:
        settings |= thread_settings(1)  # as in each worker of a job, because threads that wait for each other spin
    code, output = finish(command, settings, bound_s=bound_s, start=fork_server.popen)
    return Findings(folder, world_size, f"{output}\nexit code {code}")
