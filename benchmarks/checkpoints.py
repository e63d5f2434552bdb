"""The cost of checkpoints: the digits example on two workers, with one checkpoint per second and without checkpoints.

    phalanx run --workers 2 --backend jax benchmarks/checkpoints.py [--seconds 6] [--pairs 5]

Training runs with and without checkpoints alternate in one job, each timed from its first to its last step. The final
checkpoint is not included, because no step of a longer run would wait for it. Prints the seconds of each pair and the
median of their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import digits

import phalanx

BATCH_SIZE = 64


class Clock(keras.callbacks.Callback):
    """Seconds from the beginning of the first epoch to the end of the last."""

    seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        if epoch == 0:
            self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.seconds = time.perf_counter() - self._start


def main() -> None:
    options = parse_options()
    keras.utils.set_random_seed(1)
    x, _, y, _ = digits.load_data()
    strategy = phalanx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = digits.make_model()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    def seconds(epochs: int, *callbacks: keras.callbacks.Callback) -> float:
        clock = Clock()
        model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, verbose=0, callbacks=[clock, *callbacks])
        return clock.seconds

    seconds(2)  # compiles
    with tempfile.TemporaryDirectory() as folder:
        seconds(2, phalanx.callbacks.Checkpoint(folder, every_seconds=1))
    own = np.array(max(1, round(options.seconds * 2 / seconds(2))))
    epochs = int(keras.ops.convert_to_numpy(strategy.reduce("MAX", own)))
    ratios = []
    for _ in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            saving = seconds(epochs, phalanx.callbacks.Checkpoint(folder, every_seconds=1))
        plain = seconds(epochs)
        ratios.append(saving / plain)
        if strategy.is_chief:
            print(f"{epochs} epochs: {saving:.2f} s with a checkpoint a second, {plain:.2f} s without", flush=True)
    if strategy.is_chief:
        low, high = min(ratios), max(ratios)
        median = statistics.median(ratios)
        backend = keras.backend.backend()
        print(f"{backend}: {median - 1:+.1%} (of {options.pairs} pairs {low - 1:+.1%} to {high - 1:+.1%})")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each training, about")
    parser.add_argument("--pairs", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
