"""Keras `fit` on the backend named by KERAS_BACKEND, without Phalanx or as a task of a Phalanx job.

By itself, it is one process of plain Keras. `--strategy` creates the model in the scope of that strategy: under
`phalanx run --workers N` with N replicas, and with `--ps` with N workers and parameter servers. `--apart` runs N
processes of plain Keras, each with its part of the batch, that exchange nothing: the speed of N simultaneous processes
on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from typing import Any

import keras

from benchmarks.timing import Stopwatch, arguments


class Pause(keras.callbacks.Callback):  # type: ignore[misc]
    """Slows down this process by sleeping in each step."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self._seconds = ms / 1e3

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        time.sleep(self._seconds)


def _strategy(args: argparse.Namespace) -> Any:
    """Create the strategy with this name. In a parameter server process, this serves and does not return."""
    import phalanx

    options: dict[str, Any] = {"synchronous": True} if args.synchronous else {}
    if args.deterministic:
        options["communication_options"] = phalanx.CommunicationOptions(deterministic=True)
    if args.shards is not None:
        options["variable_partitioner"] = phalanx.FixedShardsPartitioner(args.shards)
    return getattr(phalanx, args.strategy)(**options)


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        names = ("MultiWorkerMirroredStrategy", "OneDeviceStrategy", "ParameterServerStrategy")
        parser.add_argument("--strategy", choices=names)
        parser.add_argument("--synchronous", action="store_true", help="parameter servers: merge gradients")
        parser.add_argument("--deterministic", action="store_true", help="the same bits for any number of workers")
        parser.add_argument("--shards", type=int, help="parameter servers: pieces of each variable")
        parser.add_argument("--apart", action="store_true", help="a model of its own in each task of the job")
        parser.add_argument("--local-batch", action="store_true", help="the work's batch is that of one replica")

    args = arguments(add)
    work = args.work
    scope: Any = nullcontext()
    number, workers, parts = 0, 1, 1
    batch, pauses = work.batch, []
    if args.strategy is not None:
        strategy = _strategy(args)
        scope = strategy.scope()
        if strategy.cluster_resolver is not None:
            number = strategy.cluster_resolver.task_id or 0
            workers = len(strategy.cluster_resolver.cluster_spec().ranked_tasks)
        if args.local_batch:
            batch *= workers
        if work.slow_ms and number == workers - 1:
            pauses = [Pause(work.slow_ms)]
    if args.apart:
        config = json.loads(os.environ["TF_CONFIG"])
        number, workers = config["task"]["index"], len(config["cluster"]["worker"])
        if not args.local_batch:
            parts = workers
            batch //= parts
    # Weights are not seeded: if TensorFlow is installed, `keras.utils.set_random_seed` imports it on every backend,
    # which delays the start by seconds, and no time here depends on the weights.
    with scope:
        model = work.compiled_keras_model(keras)

    def fit(steps: int, *, callbacks: list[Any], **options: Any) -> None:
        x, y = (part[: len(part) // parts] for part in work.data(steps))
        model.fit(x, y, batch_size=batch, verbose=0, callbacks=[*callbacks, *pauses], **options)

    stopwatch = Stopwatch(work, args.windows)
    # If each step is taken by one worker, all workers have work in the first call.
    stopwatch.time_fit(keras, fit, first_steps=1 if work.together else 2 * workers)
    if number == 0:
        stopwatch.report(backend=keras.backend.backend(), keras=keras.__version__)


if __name__ == "__main__":
    main()
