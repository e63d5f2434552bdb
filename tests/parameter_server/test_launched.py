"""Servers of a job under `phalanx run` are killed at random moments; the launcher brings them back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.backends import FIRST
from tests.support.commands import ROOT
from tests.support.programs import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

BOUND_S = 300.0
"""Against hanging only."""
EPOCHS = 400
KILLS = 5


class Launched:
    """A job of two servers with copies and two workers."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        program = ["-m", "tests.parameter_server.program", str(folder), "synchronous", str(EPOCHS)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "run", "--ps", "2", "--workers", "2", *program],
            env={**environment(FIRST), "REPLICATION": "2"},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        until = time.monotonic() + BOUND_S
        while not condition():
            assert self.process.poll() is None, f"the job ended while waiting: {what}\n{self.said}"
            assert time.monotonic() < until, f"not within {BOUND_S:g} s: {what}\n{self.said}"
            time.sleep(0.02)

    def server(self, index: int) -> int:
        """The process id of a server as it is now."""
        task = f'"task": {{"type": "ps", "index": {index}}}'
        found = [p.pid for p in psutil.Process(self.process.pid).children() if task in p.environ().get("TF_CONFIG", "")]
        assert len(found) == 1, f"{found}\n{self.said}"
        return found[0]

    def weights(self) -> list[np.ndarray[Any, Any]]:
        with np.load(self.folder / "0.weights.npz") as archive:
            return [archive[name] for name in archive.files]


def test_servers_killed_at_random_moments_change_nothing(tmp_path: Path) -> None:
    moments = random.Random(7)
    with Launched(tmp_path / "undisturbed") as job:
        assert job.process.wait(BOUND_S) == 0, job.said
        expected = job.weights()
    with Launched(tmp_path / "disturbed") as job:
        job.wait_for((job.folder / "0.epoch").exists, "the job trains")
        for kill in range(KILLS):
            time.sleep(moments.uniform(0.0, 0.5))  # the moment itself is what is tested
            os.kill(job.server(moments.randrange(2)), signal.SIGKILL)
            # Each restart brings a copy of both servers' shards: until then there is one of each.
            job.wait_for(lambda kill=kill: job.said.count("holds a copy of the shards") >= 2 * (kill + 1), "copies")
        assert job.process.wait(BOUND_S) == 0, job.said
        assert job.said.count("was killed by SIGKILL; starting it again") == KILLS
        assert "updates of its variables are lost" not in job.said
        for found, undisturbed in zip(job.weights(), expected, strict=True):
            np.testing.assert_allclose(found, undisturbed, atol=1e-3)
