"""PyTorch DistributedDataParallel over gloo: a plain model in a plain loop."""

from __future__ import annotations

import torch

from benchmarks.peers.torch_loop import gloo, time_ddp
from benchmarks.timing import Place, Stopwatch, arguments


def main() -> None:
    args, place = arguments(), Place.from_environment()
    stopwatch = Stopwatch(args.work, args.windows)
    with gloo(place):
        time_ddp(args.work.torch_model(), args.work, place, stopwatch, channels_first=True)
    if place.rank == 0:
        stopwatch.report(torch=torch.__version__)


if __name__ == "__main__":
    main()
