"""Runs real jobs of a small model on this machine for the pictures."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.launcher.watching.job_follower import read_events
from phalanx.monitoring.job_events import EVENTS_FILE, Measured, TaskStarted

BOUND_S = 300.0
KILLED_AT = "killed-at"

PROGRAM = """
import keras
import numpy as np

import phalanx

rng = np.random.default_rng(0)
x = rng.normal(size=(25600, 784)).astype("float32")
y = (x[:, :10] + rng.normal(size=(25600, 10))).argmax(axis=1)

strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential([keras.Input((784,)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=EPOCHS, verbose=2)
"""


def run_job(folder: Path, options: list[str], epochs: int, watch: Callable[[Path], None] = lambda log_dir: None) -> str:
    """Run a job, and return its terminal output.

    Args:
        folder: Empty folder; `folder / "log"` is the log directory.
        options: Options of `phalanx run`.
        epochs: Number of epochs.
        watch: Function to call with the log directory in a separate thread.
    """
    (folder / "train.py").write_text(PROGRAM.replace("EPOCHS", str(epochs)))
    command = [sys.executable, "-m", "phalanx", "run", *options, "--log-dir", "log", "train.py"]
    master, slave = pty.openpty()
    environment = {**os.environ, "KERAS_BACKEND": "jax", "COLUMNS": "104", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=folder, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    threading.Thread(target=watch, args=(folder / "log",), daemon=True).start()
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the last writer has closed it
            break
        if not part:
            break
        shown += part
    os.close(master)
    if code := process.wait(BOUND_S):
        raise RuntimeError(f"the job ended with exit code {code}:\n{shown.decode()}")
    return shown.decode().replace("\r\n", "\n")


def kill_a_worker(task: str, at_epoch: int) -> Callable[[Path], None]:
    """Return a function for `watch` that kills a worker (`kill -9`) in an epoch and writes the time to `killed-at`."""

    def watch(log_dir: Path) -> None:
        while (pid := _pid_in_epoch(log_dir, task, at_epoch)) is None:
            time.sleep(0.1)
        (log_dir / KILLED_AT).write_text(str(time.time()))
        os.kill(pid, signal.SIGKILL)

    return watch


def _pid_in_epoch(log_dir: Path, task: str, epoch: int) -> int | None:
    if not (log_dir / EVENTS_FILE).exists():
        return None
    pid = None
    for event in read_events(log_dir):
        if isinstance(event, TaskStarted) and event.task == task:
            pid = event.pid
        elif isinstance(event, Measured) and (report := event.reports.get(task)) and (report.epoch or 0) >= epoch:
            return pid
    return None


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file that `--timeline-filename` has recorded."""
    text = path.read_text().rstrip().rstrip(",")
    events: list[dict[str, Any]] = json.loads(text if text.endswith("]") else text + "]")
    return events
