"""The ranks walk their inputs together: the same number of steps, and each knows its share of every global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from phalanx.arrays.tree import leaves
from phalanx.data import LocalBatch, ShardedInput, local_range
from phalanx.errors import ConfigurationError, DisagreementError, UnsupportedError
from phalanx.monitoring import timeline
from phalanx.training.parameter_server_worker import ParameterServerWorker
from phalanx.training.replica import Replica

# Batches at the start of an epoch whose content is compared between the ranks, where each reads a stream of its own.
COMPARED_BATCHES = 3

INPUT = "input"
"""The subject of which the chief tells the other workers."""


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


class JointBatches:
    """One epoch of a source, which all ranks walk together: the same number of steps on every rank.

    Where the ranks cannot know from the input alone what the others hold (streams), they tell each other before
    each step. Where each has data of its own, a rank whose stream has ended takes part with nothing until all have.

    Attributes:
        done: how many batches have been used. Whoever uses them counts.

    Args:
        done: in the middle of the epoch, where the walk begins; None: at the epoch's beginning.
    """

    def __init__(self, source: ShardedInput, epoch: int, replica: Replica, done: int | None = None):
        self._source = source
        self._epoch = epoch
        self._replica = replica
        self.done = self._read = done or 0
        self._batches = source.epoch(epoch) if done is None else source.going_on(epoch, done)
        self._cuts: dict[int, tuple[int, ...]] = {}
        self._given: JointBatch | None = None

    def next(self) -> JointBatch | None:
        """The next batch; None at the end of the epoch.

        Raises:
            DisagreementError: on every rank, if they should read the same stream but read different ones.
            MembershipChangedError: see `regroup`.
        """
        timeline.current.enter("data")
        self._given = self._known() if self._source.uniform else self._told()
        timeline.current.leave()
        return self._given

    def holds(self, batch: JointBatch) -> bool:
        """Whether this batch is the next one, cut for the present members."""
        return self._given is batch

    def regroup(self) -> None:
        """The job has other members now: the batch that was read but not used comes again, cut for these."""
        again = self._read > self.done
        self._batches.close()
        self._source.regroup(self._replica.rank, self._replica.world_size)
        if again:
            self._source.repeat()
        self._batches = self._source.going_on(self._epoch, self.done)
        self._read = self.done
        self._given = None
        self._cuts.clear()

    def close(self) -> None:
        """Walk no further. The source goes on here in its next epoch where Keras's would."""
        self._batches.close()

    def _known(self) -> JointBatch | None:
        batch = next(self._batches, None)
        if batch is None:
            return None
        step, self._read = self._read, self._read + 1
        assert batch.global_size is not None
        if step < COMPARED_BATCHES and self._source.fingerprint is not None:
            notes = self._replica.communicator.all_gather(np.array([self._source.fingerprint()], np.int64))
            if any(note[0] != notes[0][0] for note in notes):
                raise DisagreementError(f"Batch {step} of epoch {self._epoch}: {self._source.disagreement()}")
        sizes = self._cuts.get(batch.global_size)
        if sizes is None:
            world_size = self._replica.world_size
            ranges = [local_range(batch.global_size, rank, world_size) for rank in range(world_size)]
            sizes = self._cuts[batch.global_size] = tuple(stop - start for start, stop in ranges)
        return JointBatch(batch.data, sizes, self._replica.rank)

    def _told(self) -> JointBatch | None:
        source = self._source
        batch = next(self._batches, None)
        step = self._read
        if batch is not None:
            self._read += 1
        fingerprint = source.fingerprint() if batch and source.fingerprint and step < COMPARED_BATCHES else 0
        note = np.array([batch is None, batch.size if batch else 0, fingerprint], np.int64)
        notes = np.stack(self._replica.communicator.all_gather(note))
        if notes[:, 0].all():
            return None
        if not notes[:, 0].any() and (notes[:, 2] != notes[0, 2]).any():
            raise DisagreementError(f"Batch {step} of epoch {self._epoch}: {source.disagreement()}")
        if notes[:, 0].any() and source.fingerprint:
            ended = ", ".join(map(str, np.flatnonzero(notes[:, 0])))
            raise DisagreementError(
                f"The data ended on rank {ended} after {step} batches of epoch {self._epoch}, and go on elsewhere. "
                f"{source.disagreement()}"
            )
        data = (batch or source.stand_in()).data
        return JointBatch(data, tuple(int(size) for size in notes[:, 1]), self._replica.rank)


def compare_inputs(source: ShardedInput, replica: Replica, method: str) -> None:
    """Raise on every rank if the ranks were given different data (by lengths, shapes and dtypes).

    Args:
        method: of the model, that was called.
    """
    signatures = tell_method(replica, method, source.signature)
    different = next((rank for rank, signature in enumerate(signatures) if signature != signatures[0]), None)
    if different is not None:
        raise DisagreementError(
            f"The ranks were given different data: rank 0 has {signatures[0]}; rank {different} has "
            f"{signatures[different]}. Every rank must pass the same data; Phalanx divides it. To give each "
            f"rank its own, use `strategy.distribute_datasets_from_function`."
        )


def tell_method(replica: Replica, method: str, text: str) -> list[str]:
    """Every rank's text about the method of the model that it called. Raises DisagreementError, on every rank, if they
    called different ones."""
    told = [one.decode().partition("\n") for one in replica.communicator.all_gather_bytes(f"{method}\n{text}".encode())]
    methods = [name for name, _, _ in told]
    other = next((rank for rank, name in enumerate(methods) if name != methods[0]), None)
    if other is not None:
        raise DisagreementError(
            f"Rank 0 called {methods[0]}() where rank {other} called {methods[other]}(). Every rank must call the same "
            f"methods of the model: do not put them under `if strategy.is_chief`."
        )
    return [text for _, _, text in told]


def check_batch_size(model: Any, batch: LocalBatch, replicas: int) -> None:
    """Raise ConfigurationError if layers with a state for each sample of a batch are built for other batches than a
    replica gets."""
    stateful = next((layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)), None)
    if stateful is None or replicas == 1 or not batch.size:
        return
    try:
        inputs = leaves(model.inputs)
    except (AttributeError, ValueError):  # of a subclassed model
        return
    fixed = {one.shape[0] for one in inputs if one is not None and one.shape[0] not in (None, batch.size)}
    if fixed:
        raise ConfigurationError(
            f"{stateful.name} is stateful, with a state for each of the {max(fixed)} samples of the Input's "
            f"batch_shape; but each of the {replicas} replicas gets its part of a global batch, {batch.size} samples "
            f"here. Give Input the part of one replica, batch_shape=({batch.size}, ...), and global batches that have "
            f"equal parts."
        )


def check_normalization(model: Any) -> None:
    """Raise UnsupportedError for batch normalization over all replicas' batches, where they do not wait for each
    other."""
    for layer in model._flatten_layers():
        # A frozen one uses what it has collected.
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized and layer.trainable:
            raise UnsupportedError(
                f"{layer.name!r} of {model.name!r} is a BatchNormalization(synchronized=True), whose replicas meet in "
                f"every step; with this strategy they do not wait for each other. Leave out synchronized=True, or use "
                f"MultiWorkerMirroredStrategy."
            )


SEEDS = (
    "If they are made or split at random, give a seed (`random_state=0`, `np.random.default_rng(0)`, and to PyTorch's "
    "random_split `generator=torch.Generator().manual_seed(0)`)."
)


def compare_samples(source: ShardedInput, replica: Replica) -> None:
    """Raise on every rank if the ranks hold different values, or the same ones in another order."""
    samples = replica.communicator.all_gather(source.sample)
    same = [_same(sample, samples[0]) for sample in samples]
    if not all(same):
        raise DisagreementError(
            f"The ranks were given different data: the values of rank {same.index(False)} are not those of rank 0, or "
            f"stand in another order. Every rank must pass the same data; Phalanx divides it. {SEEDS} To give each "
            f"rank its own data, use `strategy.distribute_datasets_from_function`."
        )


def tell_of_input(source: ShardedInput, worker: ParameterServerWorker, fit: int) -> None:
    """On the chief among parameter servers: what the others compare their data with."""
    worker.broadcast(INPUT, [np.frombuffer(source.signature.encode(), np.uint8), source.sample], fit)


def compare_input_with_chief(source: ShardedInput, worker: ParameterServerWorker, fit: int) -> None:
    """On another worker: raise DisagreementError if it was given other data than the chief."""
    told = worker.receive_broadcast(INPUT, fit)
    if told is None:
        return
    chiefs, own = bytes(told[0]).decode(), source.signature
    why = f"the chief has {chiefs}; this worker has {own}." if chiefs != own else ""
    if not why and not _same(source.sample, np.frombuffer(told[1], np.float64)):
        why = f"the values of this worker are not those of the chief, or stand in another order. {SEEDS}"
    if why:
        raise DisagreementError(
            f"The workers were given different data: {why} Every worker must pass the same data, of which the first "
            f"server hands out the batches."
        )


def _same(sample: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    # Not to the bit: hosts of different kinds round differently.
    return sample.shape == other.shape and np.allclose(sample, other, rtol=1e-3, atol=1e-3, equal_nan=True)
