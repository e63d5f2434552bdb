"""tf.distribute.ParameterServerStrategy with tf_keras: one server, two workers, and a coordinator that reports.

Uses `fit` by default. `--steps-per-call N` is the fastest loop according to its guide: a `ClusterCoordinator` schedules
functions that take N steps each, and waits for them at the end of a window.

Each worker creates a small data set in its own memory and repeats it: data from the coordinator would be sent as part
of the function's graph.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.timing import Place, Stopwatch, arguments
from benchmarks.work import CLASSES, SEED, Work

DATA_STEPS = 20
POLL_S = 0.02


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps-per-call", type=int, help="write a loop instead of fit()")

    args, place = arguments(add), Place.from_environment()
    tasks = [("chief", 0), *[("worker", index) for index in range(place.world_size - 2)], ("ps", 0)]
    cluster: dict[str, list[str]] = {}
    for (kind, _), port in zip(tasks, place.ports, strict=True):
        cluster.setdefault(kind, []).append(f"127.0.0.1:{port}")
    kind, index = tasks[place.rank]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
    os.environ["GRPC_FAIL_FAST"] = "use_caller"  # as in the guide: the workers may start later

    import tensorflow as tf
    import tf_keras as keras

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if kind != "chief":
        _serve(tf, resolver)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    stopwatch = Stopwatch(args.work, args.windows)
    if args.steps_per_call is None:
        _time_fit(tf, keras, strategy, args.work, stopwatch)
    else:
        _time_loop(tf, keras, strategy, args.work, stopwatch, args.steps_per_call)
    stopwatch.report(tensorflow=tf.__version__)
    os._exit(0)  # its threads wait for servers that are exiting


def _serve(tf: Any, resolver: Any) -> None:
    """Run a worker or the server until the figures are available."""
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        start=True,
    )
    threading.Thread(target=server.join, daemon=True).start()
    result = Path(os.environ["BENCH_RESULT"])
    while not result.exists():
        time.sleep(POLL_S)
    os._exit(0)  # a server never exits by itself


def _dataset(tf: Any, work: Work) -> Callable[[Any], Any]:
    def make(context: Any = None) -> Any:
        # Created by operations: arrays would be constants of the graph, 4 MB that are sent to each worker in one
        # request.
        count = DATA_STEPS * work.batch
        x = tf.random.stateless_uniform((count, *work.shape), (SEED, 0))
        y = tf.random.stateless_uniform((count,), (SEED, 1), maxval=CLASSES, dtype=tf.int32)
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        return dataset.repeat().batch(work.batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    return make


def _time_fit(tf: Any, keras: Any, strategy: Any, work: Work, stopwatch: Stopwatch) -> None:
    with strategy.scope():
        model = work.compiled_keras_model(keras)
    data = keras.utils.experimental.DatasetCreator(_dataset(tf, work))
    _, windows = stopwatch.callbacks(keras)
    # Callbacks on batches are not supported here, so a first epoch of one step is timed from outside.
    model.fit(data, steps_per_epoch=1, verbose=0)
    stopwatch.first_step()
    if stopwatch.windows:
        model.fit(data, steps_per_epoch=work.steps, epochs=stopwatch.epochs, verbose=0, callbacks=[windows])


def _time_loop(tf: Any, keras: Any, strategy: Any, work: Work, stopwatch: Stopwatch, steps_per_call: int) -> None:
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = work.keras_model(keras)
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(loss_of(y, model(x, training=True)), global_batch_size=work.batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def call(iterator: Any) -> None:
        for _ in range(steps_per_call):
            strategy.run(step, args=next(iterator))

    def dataset() -> Any:
        return strategy.distribute_datasets_from_function(_dataset(tf, work))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def train(calls: int) -> None:
        for _ in range(calls):
            coordinator.schedule(call, args=(iterator,))
        coordinator.join()

    stopwatch.time_loop(train, lambda steps: max(1, steps // steps_per_call))


if __name__ == "__main__":
    main()
