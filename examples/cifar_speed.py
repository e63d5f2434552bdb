"""One replica against several: how fast, and how well, a small convolutional network learns CIFAR-10.

    python examples/cifar_speed.py --workers 1 2
    python examples/cifar_speed.py --workers 1 2 --synthetic --backend tensorflow

`phalanx.launch` trains the same model on the same global batches with each number of local replicas, which divide
the cores among them. Prints a table and writes a plot to runs/cifar_speed.png. XLA's convolutions on CPU are slow:
on a machine without GPUs, use TensorFlow for such models.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import phalanx

BACKENDS = {"tensorflow": "tensorflow", "torch": "torch", "jax": "jax"}  # fastest at this first
Arrays = tuple[np.ndarray, np.ndarray]


@dataclass
class Result:
    """What one training was like; times are those of all replicas together."""

    workers: int
    samples_per_s: float
    loss: float
    accuracy: float


def main() -> None:
    options = parse_options()
    if not options.synthetic:
        fetch(options.backend)
    results = []
    for workers in options.workers:
        arguments = (options.samples, options.epochs, options.batch_size, options.synthetic)
        results.append(phalanx.launch(train, workers=workers, args=arguments, backend=options.backend)[0])
    print_table(results)
    print(f"plot: {plot(results, options)}")


def train(samples: int, epochs: int, batch_size: int, synthetic: bool) -> Result:
    """Train on the replicas of this job; runs in each of them."""
    import statistics
    import time

    import keras

    class EpochTimes(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
            self._start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            self.seconds.append(time.perf_counter() - self._start)

    keras.utils.set_random_seed(1)
    (x, y), test = synthetic_cifar(samples) if synthetic else keras_cifar(samples)
    strategy = phalanx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    times = EpochTimes()
    # The first epoch compiles, so it is one more and is not counted.
    history = model.fit(x, y, batch_size=batch_size, epochs=epochs + 1, callbacks=[times], verbose=0).history
    _, accuracy = model.evaluate(*test, batch_size=batch_size, verbose=0)
    speed = len(x) / statistics.median(times.seconds[1:])
    return Result(strategy.num_replicas_in_sync, speed, history["loss"][-1], accuracy)


def synthetic_cifar(samples: int) -> tuple[Arrays, Arrays]:
    """Images shaped like CIFAR-10's: a smooth pattern for each class, under noise."""
    random = np.random.default_rng(seed=0)
    patterns = random.uniform(size=(10, 8, 8, 3)).repeat(4, axis=1).repeat(4, axis=2)

    def images(count: int) -> Arrays:
        classes = random.integers(0, 10, count)
        noise = random.normal(scale=0.5, size=(count, 32, 32, 3))
        return (patterns[classes] + noise).astype("float32"), classes.astype("int32")

    return images(samples), images(max(samples // 5, 1))


def keras_cifar(samples: int) -> tuple[Arrays, Arrays]:
    import keras

    (x, y), (x_test, y_test) = keras.datasets.cifar10.load_data()
    train = x[:samples].astype("float32") / 255, y[:samples, 0].astype("int32")
    return train, (x_test[: samples // 5].astype("float32") / 255, y_test[: samples // 5, 0].astype("int32"))


def fetch(backend: str) -> None:
    """Bring CIFAR-10 into Keras's cache before the replicas start, which then only read it."""
    os.environ["KERAS_BACKEND"] = backend  # one that is installed
    import keras

    try:
        keras.datasets.cifar10.load_data()
    except Exception as error:  # Keras raises a plain Exception where a download fails
        sys.exit(f"CIFAR-10: {error}\nIt is neither cached nor can it be fetched. Run with --synthetic.")


def print_table(results: Sequence[Result]) -> None:
    first = results[0].samples_per_s
    print(f"{'replicas':>8}  {'samples/s':>9}  {'speed-up':>8}  {'loss':>7}  {'test accuracy':>13}")
    for r in results:
        print(
            f"{r.workers:>8}  {r.samples_per_s:>9,.0f}  {r.samples_per_s / first:>7.2f}x  {r.loss:>7.4f}  "
            f"{r.accuracy:>13.2%}"
        )


def plot(results: Sequence[Result], options: argparse.Namespace) -> Path:
    import matplotlib

    matplotlib.use("Agg")  # draws to files, also where there is no screen
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    bars = axis.bar([str(r.workers) for r in results], [r.samples_per_s for r in results], width=0.6)
    axis.bar_label(bars, labels=[f"{r.samples_per_s:,.0f}" for r in results])
    data = "generated data" if options.synthetic else "CIFAR-10"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    axis.set(
        xlabel="replicas",
        ylabel="samples/s",
        title=f"{data}, {options.backend}, {cores} cores, global batch {options.batch_size}",
    )
    axis.title.set_fontsize("medium")
    axis.margins(y=0.12)
    path = options.out / "cifar_speed.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def parse_options() -> argparse.Namespace:
    installed = [name for name, module in BACKENDS.items() if importlib.util.find_spec(module)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of replicas to try")
    parser.add_argument("--backend", choices=list(BACKENDS), default=os.environ.get("KERAS_BACKEND") or installed[0])
    parser.add_argument("--samples", type=int, default=10_000, help="training images")
    parser.add_argument("--epochs", type=int, default=3, help="measured epochs, after one that compiles")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step, over all replicas")
    parser.add_argument("--synthetic", action="store_true", help="generate data instead of fetching CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the plot")
    return parser.parse_args()


if __name__ == "__main__":
    main()
