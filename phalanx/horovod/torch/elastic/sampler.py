"""A sampler that records processed samples, so that an epoch can continue on other ranks. Names are Horovod's.

There are two ways to record them:

- `record_batch`: all ranks have processed a batch of this size. Since samples are assigned round-robin, these are the
  next ones in the order shared by all ranks, so one number is enough and no communication is needed.
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
    """This rank's share of each epoch: unprocessed samples, assigned round-robin.

    If they cannot be divided equally, the first ones are used twice, so that all ranks have the same number.

    Make it a part of the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch
    (at the start, it would restart an epoch that continues).

    Args:
        dataset: A dataset of constant length.
        shuffle: Whether each epoch has a different order.
        seed: Seed of the order; equal on all ranks.

    Attributes:
        epoch: Number of the epoch, which determines the order.
        processed_num: Number of processed samples, from the start of the epoch's order.
        processed_indices: The processed samples, if some were recorded by `record_indices`.
        remaining_indices: The samples that remained at the last assignment, in order.
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
        """Start an epoch without processed samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that all ranks have processed the next batch of this size.

        Args:
            batch_idx: Not used; accepted for compatibility with Horovod.
            batch_size: Number of samples of each rank. Samples recorded by `record_indices` are not skipped: use only
                one of the two methods in an epoch.
        """
        rows = batch_size * self.num_replicas
        if self.processed_indices:
            self.processed_indices.update(self._assigned(self._recorded, self._recorded + rows))
        else:
            self.processed_num += rows
        self._recorded += rows

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has processed these samples; all ranks must record theirs before the next commit."""
        # Only one of the two representations at a time: convert the number to a set first.
        if self.processed_num:
            order = self._order()
            self.processed_indices.update(order[: self.processed_num])
            self.processed_num = 0
        self.processed_indices.update(int(index) for index in indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return this rank's samples in the batch with this number, counted since the last assignment."""
        own = list(self)
        return own[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def set_processed(self, processed_indices: set[int]) -> None:
        """Set the samples that any rank has processed."""
        self.processed_indices = processed_indices

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the processed samples."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": self.processed_indices,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, with the current ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Assign the remaining samples to the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        self._recorded = 0  # number of `remaining_indices` that `record_batch` has counted
        left = self._order()[self.processed_num :]
        self.remaining_indices = [index for index in left if index not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self._assigned(0, self.total_size)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples

    def _order(self) -> list[int]:
        """Return all samples, in the order of this epoch."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        return order

    def _assigned(self, start: int, stop: int) -> list[int]:
        """Return a part of the samples assigned to all ranks, repeated if fewer samples than ranks remain."""
        left = self.remaining_indices
        return [left[index % len(left)] for index in range(start, min(stop, self.total_size))]
