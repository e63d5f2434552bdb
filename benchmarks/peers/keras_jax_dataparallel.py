"""Keras DataParallel on JAX with several processes: XLA's collectives over gloo, and `fit` of Keras 3."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

from typing import Any

import jax
import keras

from benchmarks.timing import Place, Stopwatch, arguments


def main() -> None:
    args, place = arguments(), Place.from_environment()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    keras.utils.set_random_seed(0)
    keras.distribution.initialize(f"127.0.0.1:{place.ports[0]}", place.world_size, place.rank)
    devices = keras.distribution.list_devices("cpu")
    # Keras never shards arrays: each process passes its own part.
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False))
    model = args.work.compiled_keras_model(keras)

    def fit(steps: int, **options: Any) -> None:
        x, y = (place.share(samples) for samples in args.work.data(steps))
        model.fit(x, y, batch_size=args.work.batch // place.world_size, verbose=0, **options)

    stopwatch = Stopwatch(args.work, args.windows)
    stopwatch.time_fit(keras, fit)
    if place.rank == 0:
        stopwatch.report(jax=jax.__version__, keras=keras.__version__)


if __name__ == "__main__":
    main()
