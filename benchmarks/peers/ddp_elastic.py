"""Trains on digits with PyTorch's DDP (gloo) until it is stopped, for `torchrun --max-restarts`: `ddp_elastic.py
FOLDER`."""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.random((1797, 1, 8, 8), np.float32))
    labels = torch.from_numpy(random.integers(0, 10, 1797))
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Conv2d(1, 32, 3),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(288, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 10),
        )
    )
    optimizer = torch.optim.Adam(model.parameters())
    size = 64 // torch.distributed.get_world_size()
    with open(os.path.join(sys.argv[1], f"{os.getpid()}.log"), "a", buffering=1) as file:
        for step in range(10**9):
            first = step * size % 1700
            loss = torch.nn.functional.cross_entropy(model(images[first : first + size]), labels[first : first + size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            file.write(f"{time.time()}\n")


if __name__ == "__main__":
    main()
