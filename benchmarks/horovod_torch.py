"""A plain PyTorch model in a plain loop, with `phalanx.horovod.torch`: the counterpart of `peers/torch_loop.py` with
DDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import phalanx.horovod.torch as hvd
from benchmarks.timing import Stopwatch, arguments


def main() -> None:
    args = arguments()
    work = args.work
    hvd.init()
    model = work.torch_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    adam = torch.optim.Adam(model.parameters(), fused=True)
    optimizer = hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    loss_of = nn.CrossEntropyLoss()
    local_batch = work.batch // hvd.size()

    def train(data: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, y = data
        for start in range(0, len(x), local_batch):
            loss = loss_of(model(x[start : start + local_batch]), y[start : start + local_batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def data(steps: int) -> Any:
        samples, labels = (part[hvd.rank() :: hvd.size()].copy() for part in work.data(steps))
        x, y = torch.from_numpy(samples), torch.from_numpy(labels).long()
        return (x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x), y

    stopwatch = Stopwatch(work, args.windows)
    stopwatch.time_loop(train, data)
    if hvd.rank() == 0:
        stopwatch.report(torch=torch.__version__)


if __name__ == "__main__":
    main()
