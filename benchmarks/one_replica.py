"""What a strategy of one replica costs: `fit` in its scope and in none, in alternation.

Both models live in one process and train in turn, so that what differs between two processes
(addresses, the core they woke up on) is not taken for a cost of Phalanx. A third one trains before them and is not
timed: the first model of a process finds memory in one piece, and on PyTorch is faster by up to 8 % for that alone.
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
