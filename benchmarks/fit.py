"""Keras `fit` on the backend that KERAS_BACKEND names, without Phalanx or as a replica of a Phalanx job.

By itself it is one process of plain Keras. `--strategy` puts the model into the scope of that strategy; under
`phalanx run --workers N` that makes N replicas.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import keras

from benchmarks.timing import Stopwatch, arguments


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--strategy", choices=("MultiWorkerMirroredStrategy", "OneDeviceStrategy"))

    args = arguments(add)
    scope: Any = nullcontext()
    chief = True
    if args.strategy is not None:
        import phalanx

        strategy = getattr(phalanx, args.strategy)()
        scope, chief = strategy.scope(), not strategy.cluster_resolver.task_id
    # Weights are not seeded: `keras.utils.set_random_seed` imports TensorFlow on every backend where it is installed,
    # which takes seconds of the start, and no time here depends on the weights.
    with scope:
        model = args.work.compiled_keras_model(keras)

    def fit(steps: int, **options: Any) -> None:
        x, y = args.work.data(steps)
        model.fit(x, y, batch_size=args.work.batch, verbose=0, **options)

    stopwatch = Stopwatch(args.work, args.windows)
    stopwatch.time_fit(keras, fit)
    if chief:
        stopwatch.report(backend=keras.backend.backend(), keras=keras.__version__)


if __name__ == "__main__":
    main()
