"""The plain training loop of the two PyTorch peers, and their process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timing import Place, Stopwatch
from benchmarks.work import Work


@contextmanager
def gloo(place: Place) -> Iterator[None]:
    """Context manager with a process group over gloo, which all ranks leave at the same time."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{place.ports[0]}",
        rank=place.rank,
        world_size=place.world_size,
    )
    yield
    # Without this barrier, the first rank to leave makes the gloo threads of the other abort its process.
    dist.barrier()
    dist.destroy_process_group()


def time_ddp(model: nn.Module, work: Work, place: Place, stopwatch: Stopwatch, *, channels_first: bool) -> None:
    """Time `model` in DistributedDataParallel with its fastest simple settings.

    `gradient_as_bucket_view` saves a copy and a third of the MLP's step at batch 64. The fused Adam was never slower
    than the others. `static_graph` made no difference. Uses a GPU if there is one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    loss_of = nn.CrossEntropyLoss()
    local_batch = work.batch // place.world_size

    def train(data: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, y = data
        for start in range(0, len(x), local_batch):
            local_x, local_y = (part[start : start + local_batch].to(device) for part in (x, y))
            loss = loss_of(ddp(local_x), local_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def data(steps: int) -> Any:
        samples, labels = work.data(steps)
        x, y = torch.from_numpy(place.share(samples)), torch.from_numpy(place.share(labels)).long()
        if channels_first and x.ndim == 4:
            x = x.permute(0, 3, 1, 2).contiguous()
        return x, y

    stopwatch.time_loop(train, data)
