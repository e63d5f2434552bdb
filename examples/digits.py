"""Learns to read handwritten digits: a small convolutional network on scikit-learn's digits.

    phalanx run --workers 2 examples/digits.py
    python examples/digits.py

The data is part of scikit-learn: 1797 gray images of 8 by 8 pixels, of which a fifth is held out. Runs on every
Keras backend, and writes a plot of loss and accuracy to runs/digits.png.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import phalanx


def main() -> None:
    options = parse_options()
    keras.utils.set_random_seed(options.seed)
    x_train, x_test, y_train, y_test = load_data()

    strategy = phalanx.MultiWorkerMirroredStrategy(compression=options.compression)
    steps = options.epochs * math.ceil(len(x_train) / options.batch_size)
    with strategy.scope():
        model = make_model()
        model.compile(
            optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(options.learning_rate, steps)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    if strategy.is_chief:
        print(f"{len(x_train)} images, {strategy.num_replicas_in_sync} replica(s) on {keras.backend.backend()}")

    epoch_times = EpochTimes()
    history = model.fit(
        x_train,
        y_train,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(x_test, y_test),
        validation_batch_size=len(x_test),  # one shape to compile
        callbacks=[epoch_times],
        verbose=options.verbose,
    ).history
    _, accuracy = model.evaluate(x_test, y_test, batch_size=len(x_test), verbose=0)

    if strategy.is_chief:
        path = plot(history, options.out / "digits.png", strategy.num_replicas_in_sync)
        print(f"test accuracy {accuracy:.2%}")
        print(f"speed         {len(x_train) / epoch_times.typical():,.0f} samples/s")
        print(f"plot          {path}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step, over all replicas")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--compression", default=None, help="float16, bfloat16, int8, int6, int4, top_k, ...")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the plot")
    parser.add_argument("--verbose", default="auto", help="as in model.fit: 0 shows no progress bar")
    options = parser.parse_args()
    options.verbose = options.verbose if options.verbose == "auto" else int(options.verbose)
    return options


def load_data() -> list[np.ndarray]:
    """x_train, x_test, y_train, y_test: images of shape (n, 8, 8, 1) from 0 to 1, and their digits.

    The split has a seed of its own, so that every replica makes the same one.
    """
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    return train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)


def make_model() -> keras.Model:
    # The averages of batch normalisation must settle within the few hundred steps there are, hence their momentum.
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Conv2D(32, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(10),
        ]
    )


class EpochTimes(keras.callbacks.Callback):
    """Seconds that the training part of each epoch took, without validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._start: float | None = None

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._start = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:
        if self._start is not None:
            self.seconds.append(time.perf_counter() - self._start)
            self._start = None

    def typical(self) -> float:
        """The median without the first epoch, which compiles."""
        return statistics.median(self.seconds[1:] or self.seconds)


def plot(history: dict[str, list[float]], path: Path, replicas: int) -> Path:
    """Draw loss and accuracy over the epochs, on training and held-out data; returns `path`."""
    import matplotlib

    matplotlib.use("Agg")  # draws to files, also where there is no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
        epochs = range(1, len(history[name]) + 1)
        axis.plot(epochs, history[name], label="training")
        axis.plot(epochs, history[f"val_{name}"], label="held out")
        axis.set(xlabel="epoch", ylabel=name)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"scikit-learn digits, {replicas} replica(s), {keras.backend.backend()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    main()
