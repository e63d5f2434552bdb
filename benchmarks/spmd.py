"""The cost of Phalanx compared with plain `keras.distribution` on the same mesh: alternates `fit` of both.

    python -m benchmarks.spmd --devices 2 --pairs 10

Both models are in one process, on the same CPU devices (or, with `--devices 0`, on the available accelerators), and
train the same epochs in turn. A pair is one epoch of each, and its ratio is computed per pair, so that a temporarily
slow machine is slow for both. CPU time of all threads shows the computation if other programs share the cores. Batches
are divisible by the number of devices, because plain Keras fails otherwise.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import AbstractContextManager
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

import phalanx

WIDTH, BATCH = 784, 64
STEPS = 100


def main() -> None:
    options = parse_options()
    if options.devices:
        os.environ.setdefault("PJRT_NPROC", str(options.threads))
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    devices = keras.distribution.list_devices()
    plain = keras.distribution.DataParallel(devices=devices)
    ours = phalanx.MirroredStrategy(engine="spmd")
    models = [make_model(context, options.layer) for context in (plain.scope(), plain.scope(), ours.scope())][1:]
    rows = np.random.default_rng(0)
    x = rows.normal(size=(BATCH * STEPS, WIDTH)).astype("float32")
    y = rows.integers(0, 10, len(x)).astype("int32")

    def epoch(which: int) -> np.ndarray:
        """Train an epoch, and return the milliseconds and the CPU milliseconds per step."""
        clocks = (time.perf_counter, time.process_time)
        with plain.scope() if which == 0 else ours.scope():
            start = np.array([clock() for clock in clocks])
            models[which].fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return 1e3 * (np.array([clock() for clock in clocks]) - start) / STEPS

    for _ in range(2):
        epoch(0), epoch(1)  # compile
    pairs = []
    for number in range(options.pairs):
        first = number % 2
        pair = {which: epoch(which) for which in (first, 1 - first)}
        pairs.append((pair[0], pair[1]))
    ms = np.array(pairs)  # pair, which, clock
    print(f"{len(devices)} devices ({devices[0]} ...), {options.layer} wide, batch {BATCH}, {options.pairs} pairs")
    for clock, name in enumerate(("time", "CPU time")):
        plain_ms, our_ms = np.median(ms[:, :, clock], axis=0)
        ratios = ms[:, 1, clock] / ms[:, 0, clock]
        print(
            f"{name}: keras.distribution {plain_ms:.3f} ms, Phalanx {our_ms:.3f} ms a step; ratio of a pair: median "
            f"{np.median(ratios):.3f}, {ratios.min():.3f} to {ratios.max():.3f}"
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="CPU devices; 0: the accelerators that are there")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--layer", type=int, default=256, help="width of the two hidden layers")
    parser.add_argument(
        "--threads", type=int, default=8, help="of JAX on CPUs: with few, its devices starve each other"
    )
    return parser.parse_args()


def make_model(scope: AbstractContextManager[Any], width: int) -> keras.Model:
    with scope:
        layers = [keras.layers.Dense(width, "relu"), keras.layers.Dense(width, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return model


if __name__ == "__main__":
    main()
