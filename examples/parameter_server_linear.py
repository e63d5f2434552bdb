"""The classic example of parameter servers: two workers fit a line through noisy points, y = 2x + 1, together.

    phalanx run --ps 1 --workers 2 examples/parameter_server_linear.py

Or in three terminals, each with TF_CONFIG and its own task:

    export TF_CONFIG='{"cluster": {"ps": ["localhost:2220"], "worker": ["localhost:2221", "localhost:2222"]},
                       "task": {"type": "ps", "index": 0}}'
    python examples/parameter_server_linear.py

Each worker prints the global steps that it made. They are not contiguous: the other worker makes the steps in between.
If the job is killed and started again, it continues from the chief's last backup (in --out).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np

import phalanx

SLOPE, INTERCEPT, NOISE = 2.0, 1.0, 0.1


class Steps(keras.callbacks.Callback):
    """Prints, now and then, which of the job's steps this worker made."""

    def __init__(self, strategy: phalanx.ParameterServerStrategy, every: int):
        super().__init__()
        self._strategy = strategy
        self._every = every
        self._made = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._made += 1
        if self._made % self._every == 0:
            print(f"worker {self._strategy.rank} made step {self._strategy.global_step}", flush=True)


def main() -> None:
    options = parse_options()
    strategy = phalanx.ParameterServerStrategy()
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, size=(options.samples, 1)).astype("float32")
    y = SLOPE * x + INTERCEPT + random.normal(scale=NOISE, size=x.shape).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(
        x,
        y,
        batch_size=16,
        epochs=options.epochs,
        verbose=0,
        callbacks=[
            Steps(strategy, options.every),
            keras.callbacks.BackupAndRestore(options.out / "linear", delete_checkpoint=False),
        ],
    )
    if strategy.is_chief:
        (slope,), (intercept,) = (weights.ravel() for weights in model.get_weights())
        print(f"steps {strategy.global_step}: y = {slope:.3f} x + {intercept:.3f}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--every", type=int, default=100, help="print after this many of a worker's own steps")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the backup")
    return parser.parse_args()


if __name__ == "__main__":
    main()
