"""The ranks walk their inputs together: the same number of steps, and each knows its share of every global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.errors import DisagreementError
from phalanx.inputs import ShardedInput, local_range
from phalanx.training.replica import Replica

# Batches at the start of an epoch whose content is compared between the ranks, where each reads a stream of its own.
COMPARED_BATCHES = 3


@dataclass(frozen=True, slots=True)
class JointBatch:
    """This rank's part of a global batch that all ranks have agreed on.

    Attributes:
        data: `(x, y, sample_weight)`; a stand-in of one sample where `size` is 0.
        sizes: the number of samples of every rank's part, in rank order.
        rank: this rank.
    """

    data: tuple[Any, Any, Any]
    sizes: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return self.sizes[self.rank]

    @property
    def global_size(self) -> int:
        return sum(self.sizes)

    @property
    def share(self) -> float:
        return self.size / self.global_size


def joint_batches(source: ShardedInput, epoch: int, replica: Replica) -> Iterator[JointBatch]:
    """One epoch of `source`; every rank yields equally often.

    Where the ranks cannot know from the input alone what the others hold (streams), they tell each other before
    each step. A rank whose stream has ended takes part with nothing until all have ended.

    Raises:
        DisagreementError: on every rank, if they should read the same stream but read different ones.
    """
    if source.uniform:
        yield from _known(source, epoch, replica)
    else:
        yield from _told(source, epoch, replica)


def _known(source: ShardedInput, epoch: int, replica: Replica) -> Iterator[JointBatch]:
    rank, world_size = replica.rank, replica.world_size
    cuts: dict[int, tuple[int, ...]] = {}
    for step, batch in enumerate(source.epoch(epoch)):
        assert batch.global_size is not None
        if step < COMPARED_BATCHES and source.fingerprint is not None:
            notes = replica.communicator.all_gather(np.array([source.fingerprint()], np.int64))
            if any(note[0] != notes[0][0] for note in notes):
                raise DisagreementError(f"Batch {step} of epoch {epoch}: {source.disagreement()}")
        sizes = cuts.get(batch.global_size)
        if sizes is None:
            ranges = [local_range(batch.global_size, r, world_size) for r in range(world_size)]
            sizes = cuts[batch.global_size] = tuple(stop - start for start, stop in ranges)
        yield JointBatch(batch.data, sizes, rank)


def _told(source: ShardedInput, epoch: int, replica: Replica) -> Iterator[JointBatch]:
    batches = source.epoch(epoch)
    step = 0
    while True:
        batch = next(batches, None)
        fingerprint = source.fingerprint() if batch and source.fingerprint and step < COMPARED_BATCHES else 0
        note = np.array([batch is None, batch.size if batch else 0, fingerprint], np.int64)
        notes = np.stack(replica.communicator.all_gather(note))
        if notes[:, 0].all():
            return
        if not notes[:, 0].any() and (notes[:, 2] != notes[0, 2]).any():
            raise DisagreementError(f"Batch {step} of epoch {epoch}: {source.disagreement()}")
        data = (batch or source.stand_in()).data
        yield JointBatch(data, tuple(int(size) for size in notes[:, 1]), replica.rank)
        step += 1


def compare_inputs(source: ShardedInput, replica: Replica) -> None:
    """Raise on every rank if the ranks were given different data (by lengths, shapes and dtypes)."""
    signatures = replica.communicator.all_gather_bytes(source.signature.encode())
    different = next((rank for rank, other in enumerate(signatures) if other != signatures[0]), None)
    if different is not None:
        raise DisagreementError(
            f"The ranks were given different data: rank 0 has {signatures[0].decode()}; rank {different} has "
            f"{signatures[different].decode()}. Every rank must pass the same data; Phalanx divides it. To give each "
            f"rank its own, use `strategy.distribute_datasets_from_function`."
        )


def compare_samples(source: ShardedInput, replica: Replica) -> None:
    """Raise on every rank if the ranks hold different values, or the same ones in another order."""
    samples = replica.communicator.all_gather(source.sample)
    # Not to the bit: hosts of different kinds round differently.
    same = [np.allclose(sample, samples[0], rtol=1e-3, atol=1e-3, equal_nan=True) for sample in samples]
    if not all(same):
        raise DisagreementError(
            f"The ranks were given different data: the values of rank {same.index(False)} are not those of rank 0, or "
            f"stand in another order. Every rank must pass the same data; Phalanx divides it. If they are made or "
            f"split at random, give a seed (`random_state=0`, `np.random.default_rng(0)`). To give each rank its own "
            f"data, use `strategy.distribute_datasets_from_function`."
        )
