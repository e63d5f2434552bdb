"""{leader, worker} | {chief, copy}: cuts the network between parameter servers, and looks for lost updates.

    python -m tests.chaos.server_partitions --seeds 20 [--first 0]

Two servers with `replication=2` and two workers train synchronously, connected by relays. For a time that follows from
a seed, `ps/0` and `worker/1` reach each other only, and so do the chief and `ps/1`, which has the copy of what `ps/0`
leads. In the end each batch was trained once, and the weights are those of a job whose network was never cut: no update
was lost, and none was made twice. Only if `worker/1` was cut off for longer than the job waits for anyone, it may have
been evicted; then the chief has trained the rest. The exit code is 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import EvictedError
from phalanx.transport.address import Address
from tests.parameter_server.tasks import Tasks
from tests.security.attacker import proxy_to
from tests.support.backends import FIRST

EPOCHS, BATCHES = 10, 64
TOLERANCE = 1e-3
PART = {"ps/0", "worker/1"}
TIMEOUT_S = 5.0
"""Of the job: the chief has the copy lead when the leader has not answered for so long."""


class CabledTasks(Tasks):
    """Tasks on hosts of their own, between which the network can be cut."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack):
        self._stack, self.between = stack, threading.Event()
        self.between.set()
        self._relays: dict[str, dict[str, str]] = {}
        program = ["-m", "tests.chaos.cabled_program", str(folder), "synchronous", str(EPOCHS)]
        settings = {"REPLICATION": "2", "PHALANX_TIMEOUT": f"{TIMEOUT_S:g}"}
        super().__init__(folder, program, servers=2, workers=2, backend=FIRST, settings=settings)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        if not self._relays:
            self._relays = {name: self._relays_of(name) for name in self.names}
        self._settings |= {"CABLES": json.dumps(self._relays), "PHALANX_HOST_ID": name}
        return super().start(name)

    def _relays_of(self, name: str) -> dict[str, str]:
        found = {}
        for other in self.names:
            host, port = self.address(other)
            is_open = self.between if (name in PART) != (other in PART) else None
            proxy = self._stack.enter_context(proxy_to(Address(host, port), is_open=is_open))
            found[f"{host}:{port}"] = str(proxy.address)
        return found

    def weights(self) -> list[np.ndarray[Any, Any]]:
        with np.load(self.folder / "0.weights.npz") as archive:
            return [archive[name] for name in archive.files]


def train(folder: Path, *, wait_s: float = 0.0, lasts_s: float = 0.0) -> tuple[list[np.ndarray[Any, Any]], list[str]]:
    """Run the job to its end; its weights, and what did not hold.

    Args:
        wait_s: from the first epoch's end until the network is cut.
        lasts_s: how long it is cut.
    """
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        tasks = stack.enter_context(CabledTasks(folder, stack))
        stack.callback(tasks.between.set)
        if lasts_s:
            tasks.wait_for((folder / "0.epoch").exists, "the chief trains")
            time.sleep(wait_s)
            tasks.between.clear()
            time.sleep(lasts_s)
            tasks.between.set()
        codes = tasks.ends()
        was_evicted = lasts_s > TIMEOUT_S and codes["worker/1"] == EvictedError.exit_code
        failed = [name for name, code in codes.items() if code and not (name == "worker/1" and was_evicted)]
        if failed:
            return [], [f"{failed} failed: {tasks.everything()}"]
        found = []
        if "updates of its variables are lost" in tasks.everything():
            found.append("updates are lost")
        if (folder / "0.end").read_text() != f"{EPOCHS * BATCHES} True":
            found.append(f"steps made: {(folder / '0.end').read_text()} instead of {EPOCHS * BATCHES}")
        return [] if was_evicted else tasks.weights(), found


def trial(folder: Path, seed: int, expected: list[np.ndarray[Any, Any]]) -> tuple[str, list[str]]:
    """A job whose network is cut as a seed says: what was done, and what did not hold."""
    chance = random.Random(seed)
    wait_s = round(chance.uniform(0.0, 0.5), 2)
    lasts_s = round(chance.choice([chance.uniform(0.2, 2.0), chance.uniform(2.0, 5.0), chance.uniform(8.0, 14.0)]), 1)
    weights, found = train(folder, wait_s=wait_s, lasts_s=lasts_s)
    apart = max((float(np.abs(a - b).max()) for a, b in zip(weights, expected, strict=False)), default=0.0)
    if apart > TOLERANCE:
        found.append(f"weights differ by up to {apart:.2g}")
    was_promoted = "leads the shards of group 0 from now on" in (folder / "ps-1.log").read_text()
    return f"seed {seed}, cut for {lasts_s:g} s, led by {'the copy' if was_promoted else 'ps/0'} then", found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.server_partitions", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    folder, failed = Path(tempfile.mkdtemp(prefix="server-partitions-")), 0
    expected, found = train(folder / "undisturbed")
    assert not found, found
    for seed in range(options.first, options.first + options.seeds):
        done, found = trial(folder / str(seed), seed, expected)
        failed += bool(found)
        print(f"{done}: {'; '.join(found) or 'ok'}", flush=True)
    print(f"{options.seeds} partitions, {failed} with something that did not hold; see {folder}")
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # relays may still wait


if __name__ == "__main__":
    sys.exit(main())
