"""`kill -9` of a worker at a random moment of `fit`: every other process ends at once, and names the one that was lost.

The workers are started by hand, without `phalanx run`, so that no launcher ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.errors import PeerLostError
from tests.support import fork_server
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import ROOT
from tests.support.programs import environment

WORLD_SIZE = 3
START_BOUND_S = 120.0
END_WITHIN_S = 15.0
"""At once, on a machine that is not busy; a silent host would be noticed after 25 s."""
SHARED_MEMORY = Path("/dev/shm")

PROGRAM = """
import sys
from pathlib import Path

import keras
import numpy as np

import phalanx

strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(4096, 8)).astype("float32")
begun = keras.callbacks.LambdaCallback(
    on_epoch_begin=lambda epoch, logs: epoch == 1 and Path(sys.argv[1], str(strategy.rank)).touch()
)
model.fit(x, x[:, :1], batch_size=16, epochs=100_000, verbose=0, callbacks=[begun])
"""


class Workers:
    """Worker processes of one job, each its own group."""

    def __init__(self, folder: Path, backend: str, text: str = PROGRAM, world_size: int = WORLD_SIZE):
        self.folder = folder
        program = folder / "program.py"
        program.write_text(text)
        # The ports stay ours from the beginning: each worker inherits its listening socket.
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(world_size)]
        addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in sockets]
        secret = secrets.token_hex()
        self.processes = []
        for index, listener in enumerate(sockets):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            own = {"TF_CONFIG": json.dumps(task), "PHALANX_SECRET": secret, "PHALANX_LISTEN_FD": str(listener.fileno())}
            with open(folder / f"{index}.err", "w") as errors:
                self.processes.append(
                    fork_server.popen(
                        [sys.executable, str(program), str(folder)],
                        env={**environment(backend), **own, "OMP_NUM_THREADS": "1"},
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=errors,
                        stderr=errors,
                        pass_fds=[listener.fileno()],
                    )
                )
        for listener in sockets:
            listener.close()

    def said(self, index: int) -> str:
        return (self.folder / f"{index}.err").read_text()

    def wait_until_all_train(self) -> None:
        deadline = time.monotonic() + START_BOUND_S
        while not all((self.folder / str(index)).exists() for index in range(len(self.processes))):
            for index, process in enumerate(self.processes):
                assert process.poll() is None, f"worker {index} ended with {process.returncode}:\n{self.said(index)}"
            assert time.monotonic() < deadline, "\n".join(self.said(index) for index in range(len(self.processes)))
            time.sleep(0.02)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def in_shared_memory() -> Iterator[None]:
    """Nothing of ours is left behind in /dev/shm."""
    before = _named_segments()
    yield
    assert _named_segments() <= before


def _named_segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("*phalanx*")} if SHARED_MEMORY.exists() else set()


def _backends() -> list[object]:
    return [pytest.param(name, marks=getattr(pytest.mark, name)) for name in BACKENDS]


def _kill_one(
    folder: Path, backend: str, victim: int, delay_s: float, text: str = PROGRAM, world_size: int = WORLD_SIZE
) -> None:
    workers = Workers(folder, backend, text, world_size)
    try:
        workers.wait_until_all_train()
        time.sleep(delay_s)  # the moment itself is what is tested
        os.kill(workers.processes[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        for index, process in enumerate(workers.processes):
            said = f"worker {victim} was killed after {delay_s:.3f} s; worker {index} said:\n"
            if index == victim:
                assert process.wait(END_WITHIN_S) == -signal.SIGKILL
                continue
            try:
                code = process.wait(max(0.0, killed + END_WITHIN_S - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"still running after {END_WITHIN_S} s; {said}{workers.said(index)}")
            assert code == PeerLostError.exit_code, said + workers.said(index)
            assert "PeerLostError" in workers.said(index), said + workers.said(index)
            assert f"worker/{victim}" in workers.said(index), said + workers.said(index)
    finally:
        workers.end()


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("in_shared_memory")
@pytest.mark.parametrize("victim", [0, pytest.param(WORLD_SIZE - 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", _backends())
def test_survivors_of_a_killed_worker_end_and_name_it(tmp_path: Path, backend: str, victim: int) -> None:
    # That all survivors end is the same for all backends; how one is interrupted in a step is not.
    _kill_one(tmp_path, backend, victim, random.random(), world_size=WORLD_SIZE if victim or backend == FIRST else 2)


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("in_shared_memory")
def test_survivors_whose_layer_waits_for_a_killed_worker_end_and_name_it(tmp_path: Path) -> None:
    """Keras makes an error of its own of what a layer raises outside of a graph."""
    layers = "keras.Input((8,)), "
    text = PROGRAM.replace(layers, layers + "keras.layers.BatchNormalization(synchronized=True), ")
    text = text.replace('"mse")', '"mse", run_eagerly=True)').replace("4096", "256")
    _kill_one(tmp_path, "tensorflow", 1, random.random(), text, world_size=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("in_shared_memory")
@pytest.mark.parametrize("repetition", range(20))
@pytest.mark.parametrize("backend", _backends())
def test_survivors_end_wherever_and_whenever_a_rank_is_killed(tmp_path: Path, backend: str, repetition: int) -> None:
    _kill_one(tmp_path, backend, random.randrange(WORLD_SIZE), 2 * random.random())
