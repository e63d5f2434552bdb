"""Keras on PyTorch in DistributedDataParallel over gloo, with the loop of Keras's guide.

Source: https://keras.io/guides/distributed_training_with_torch/
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras

from benchmarks.peers.torch_loop import gloo, time_ddp
from benchmarks.timing import Place, Stopwatch, arguments


def main() -> None:
    args, place = arguments(), Place.from_environment()
    stopwatch = Stopwatch(args.work, args.windows)
    with gloo(place):
        time_ddp(args.work.keras_model(keras), args.work, place, stopwatch, channels_first=False)
    if place.rank == 0:
        stopwatch.report(keras=keras.__version__)


if __name__ == "__main__":
    main()
