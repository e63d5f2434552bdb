"""The cost of a strategy with one replica: alternates `fit` with and without its scope.

Both models are in one process and train in turn, so that differences between two processes (addresses, cores) do not
count as a cost of Phalanx. A third model trains before them and is not timed: the first model of a process gets
contiguous memory, which alone makes it up to 8 % faster on PyTorch.
"""

from __future__ import annotations

import keras

import phalanx
from benchmarks.timing import Stopwatch, arguments, write_result


def main() -> None:
    args = arguments()
    x, y = args.work.data()
    keras.utils.set_random_seed(0)
    first = args.work.compiled_keras_model(keras)
    first.fit(x, y, batch_size=args.work.batch, epochs=2, verbose=0)
    plain = args.work.compiled_keras_model(keras)
    with phalanx.MultiWorkerMirroredStrategy().scope():
        replica = args.work.compiled_keras_model(keras)

    ms: dict[keras.Model, list[float]] = {plain: [], replica: []}
    for _ in range(max(args.windows, 1)):
        for model in (plain, replica):
            stopwatch = Stopwatch(args.work, windows=1)
            _, windows = stopwatch.callbacks(keras)
            model.fit(x, y, batch_size=args.work.batch, epochs=stopwatch.epochs, verbose=0, callbacks=[windows])
            ms[model].extend(stopwatch.ms_per_step)
    write_result({"work": args.work.name, "ms_per_step": ms[replica], "paired_ms_per_step": ms[plain]})


if __name__ == "__main__":
    main()
