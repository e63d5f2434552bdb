"""Keras `fit` without a strategy, with the optimizer and the callback of `phalanx.horovod.keras`."""

from __future__ import annotations

from typing import Any

import keras

import phalanx.horovod.keras as hvd
from benchmarks.timing import Stopwatch, arguments


def main() -> None:
    args = arguments()
    work = args.work
    hvd.init()
    model = work.keras_model(keras)
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    local_batch = work.batch // hvd.size()

    def fit(steps: int, *, callbacks: list[Any], **options: Any) -> None:
        x, y = (part[hvd.rank() :: hvd.size()].copy() for part in work.data(steps))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
        model.fit(x, y, batch_size=local_batch, verbose=0, callbacks=callbacks, **options)

    stopwatch = Stopwatch(work, args.windows)
    stopwatch.time_fit(keras, fit)
    if hvd.rank() == 0:
        stopwatch.report(backend=keras.backend.backend(), keras=keras.__version__)


if __name__ == "__main__":
    main()
