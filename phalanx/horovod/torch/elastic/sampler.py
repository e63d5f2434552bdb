"""A sampler that knows what has been processed, so that an epoch can go on with other ranks. Names are Horovod's.

Two ways to say what has been processed:

- `record_batch`: all ranks have processed a batch of this size. As the samples are dealt out in turn, these are the
  next ones of the order that all ranks have in common: one number says which. Nobody need be asked.
- `record_indices`: this rank has processed these samples. The others hear of it at the next commit.
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

    Where they cannot be dealt out equally, the first ones are taken twice, so that all ranks have as many.

    Make it a part of the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch
    (not at its beginning: an epoch that goes on would begin anew).

    Attributes:
        epoch: which order.
        processed_num: how many samples of the epoch's order have been processed, from its beginning.
        processed_indices: the samples that were processed, where some were named by `record_indices`.
        remaining_indices: what was left when it was dealt out, in order.

    Args:
        dataset: of a constant length.
        shuffle: whether each epoch has an order of its own.
        seed: of the order; the same on all ranks.
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
        """Begin an epoch: nothing is processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have processed a batch of this size."""
        rows = batch_size * self.num_replicas
        if self.processed_indices:
            self.processed_indices.update(self._dealt(self._recorded, self._recorded + rows))
        else:
            self.processed_num += rows
        self._recorded += rows

    def record_indices(self, indices: Iterable[int]) -> None:
        """This rank has processed these samples; all ranks must say so of theirs before the next commit."""
        if self.processed_num:
            order = self._order()
            self.processed_indices.update(order[: self.processed_num])
            self.processed_num = 0
        self.processed_indices.update(int(index) for index in indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples of its batch of this number, since they were dealt out."""
        own = list(self)
        return own[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def unite(self, processed_indices: set[int]) -> None:
        """What was processed on any rank."""
        self.processed_indices = processed_indices

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": self.processed_indices,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, among the ranks that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Deal out what is left among the ranks that there are now."""
        self.num_replicas = size()
        self.rank = rank()
        self._recorded = 0
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
        """A part of what all ranks are dealt in turn. It is repeated as often as needed: there may be fewer samples
        left than ranks."""
        left = self.remaining_indices
        return [left[index % len(left)] for index in range(start, min(stop, self.total_size))]
