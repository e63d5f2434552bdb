"""tf.distribute.MultiWorkerMirroredStrategy with RING, and `fit` of tf_keras, the Keras that supports it.

Arrays given to `fit` were as fast as a `tf.data.Dataset` with AutoShardPolicy.DATA.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from benchmarks.timing import Place, Stopwatch, arguments


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps-per-execution", type=int, default=1)

    args, place = arguments(add), Place.from_environment()
    workers = [f"127.0.0.1:{port}" for port in place.ports]
    task = {"type": "worker", "index": place.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

    import tensorflow as tf
    import tf_keras as keras

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = args.work.compiled_keras_model(keras, steps_per_execution=args.steps_per_execution)

    def fit(steps: int, **options: Any) -> None:
        x, y = args.work.data(steps)
        model.fit(x, y, batch_size=args.work.batch, verbose=0, **options)

    stopwatch = Stopwatch(args.work, args.windows)
    stopwatch.time_fit(keras, fit, first_steps=args.steps_per_execution)
    if place.rank == 0:
        stopwatch.report(tensorflow=tf.__version__)


if __name__ == "__main__":
    main()
