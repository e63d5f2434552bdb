"""A sampler that records processed samples, so that an epoch can continue on other ranks. Names are Horovod's.

There are two ways to record them:

- `record_batch`: all ranks have processed a batch of this size. Since samples are dealt out in turn, these are the next
  ones of the order that all ranks share, so one number is enough and no communication is needed.
- `record_indices`: this rank has processed these samples. The others receive them at the next commit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from phalanx.horovod.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """This rank's samples of each epoch: those that have not been processed, dealt out in turn.

    If they cannot be dealt out equally, the first ones are used twice, so that all ranks have the same number.

    Make it a part of the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch
    (at its beginning, it would restart an epoch that continues).

    Args:
        dataset: a dataset of constant length.
        shuffle: whether each epoch has a different order.
        seed: seed of the order; the same on all ranks.

    Attributes:
        epoch: number of the epoch, which determines the order.
        processed_num: number of samples processed, from the beginning of the epoch's order.
        processed_indices: the samples processed, if some were recorded by `record_indices`.
        remaining_indices: the samples that were left when they were dealt out, in order.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, of which nothing is processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that all ranks have processed a batch of this size, the one behind the last that was recorded so.

        Args:
            batch_idx: not needed; as in Horovod.
            batch_size: samples of each rank. Those that were recorded by `record_indices` are not passed over: use one
                of the two in an epoch.
        """
        rows = batch_size * self.num_replicas
        if self.processed_indices:
            self.processed_indices.update(self._dealt(self._recorded, self._recorded + rows))
        else:
            self.processed_num += rows
        self._recorded += rows

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has processed these samples; all ranks must record theirs before the next commit."""
        # One of the two ways at a time: what the number says becomes a set first.
        if self.processed_num:
            order = self._order()
            self.processed_indices.update(order[: self.processed_num])
            self.processed_num = 0
        self.processed_indices.update(int(index) for index in indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples in the batch of this number, counted since samples were dealt out."""
        own = list(self)
        return own[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def unite(self, processed_indices: set[int]) -> None:
        """Set the samples that were processed on any rank."""
        self.processed_indices = processed_indices

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the samples processed."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": self.processed_indices,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, with the present ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Deal out the remaining samples to the present ranks."""
        self.num_replicas = size()
        self.rank = rank()
        self._recorded = 0  # samples of `remaining_indices` that `record_batch` has counted
        left = self._order()[self.processed_num :]
        self.remaining_indices = [index for index in left if index not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self._dealt(0, self.total_size)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples

    def _order(self) -> list[int]:
        """All samples, in the order of this epoch."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        return order

    def _dealt(self, start: int, stop: int) -> list[int]:
        """A part of the samples that all ranks are dealt in turn, repeated if fewer samples than ranks are left."""
        left = self.remaining_indices
        return [left[index % len(left)] for index in range(start, min(stop, self.total_size))]
