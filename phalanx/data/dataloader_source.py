"""`torch.utils.data.DataLoader`: with a map-style dataset a rank loads and collates only its own samples."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from phalanx.arrays.tree import map_leaves
from phalanx.data.array_source import numbers_of, sampled_rows
from phalanx.data.batch_split import LocalShare, batch_size_of, cut, local_range
from phalanx.data.elements import to_numpy
from phalanx.data.sharding_policy import AutoShardPolicy
from phalanx.data.shuffling import Shuffling
from phalanx.data.source import RandomAccessSource, StreamSource, same_stream
from phalanx.errors import ConfigurationError
from phalanx.keras_compat import data_adapters
from phalanx.transport.serialization import decode, encode

Array = np.ndarray[Any, Any]

_KIND = "torch DataLoader"


def dataloader_source(
    loader: Any, *, whole_passes: bool, rank: int, world_size: int, seed: int, shuffling: Shuffling | None = None
) -> MapStyleSource | StreamSource:
    """A source over a DataLoader whose batches are the global batches.

    A loader with a `DistributedSampler` of this job's size reads this rank's data already; it is taken as
    it is, with its batch size as the local one.

    Raises: ConfigurationError for a DistributedSampler of another size or rank.
    """
    from torch.utils.data import IterableDataset
    from torch.utils.data.distributed import DistributedSampler

    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        if (sampler.num_replicas, sampler.rank) != (world_size, rank):
            raise ConfigurationError(
                f"The DataLoader's DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, "
                f"but this is rank {rank} of {world_size}. Leave the sampler out (shuffle=True is enough: "
                "the global batches are cut for you), or make it with this job's size and rank."
            )
        return StreamSource(
            lambda key: _elements(loader),
            kind=f"{_KIND} with a DistributedSampler",
            rank=rank,
            world_size=world_size,
            num_batches=len(loader),
            per_rank=True,
            reads_ahead=loader.num_workers > 0,
            draws=True,
            policy=AutoShardPolicy.OFF,
            reason="its sampler has divided the samples already, and its batch size is that of one replica",
            signature=f"{_KIND} of {len(loader)} batches of one rank",
            shares=[f"reads the samples of its sampler, shard {r} of {world_size}" for r in range(world_size)],
        )
    batches = sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or not hasattr(batches, "__len__"):
        return StreamSource(
            lambda key: _elements(loader),
            kind=_KIND,
            rank=rank,
            world_size=world_size,
            reads_ahead=loader.num_workers > 0,
            draws=True,
            reason="its dataset can only be read in order, so every replica reads it and keeps its part",
        )
    return MapStyleSource(
        loader, whole_passes=whole_passes, rank=rank, world_size=world_size, seed=seed, shuffling=shuffling
    )


class MapStyleSource(RandomAccessSource):
    """A DataLoader over a dataset with `__getitem__`.

    The batch sampler says which samples form each global batch; this rank's loader gets only its own part
    of their indices. Samplers draw from torch's generator: on the chief as in plain Keras, on the others from
    the state that it had there; without a `shuffling` it is seeded for this from `seed` and the pass. A sampler
    with a generator of its own uses that, and gives the order that the plain DataLoader gives. Ranks that come
    later are given that generator's state (`randomness`).

    `collate_fn` sees the local batch only: one that pads to the longest sample pads to the longest local one.
    """

    kind = _KIND
    policy = AutoShardPolicy.DATA
    uniform = True
    endless = False
    by_number = False
    draws = True

    def __init__(
        self,
        loader: Any,
        *,
        whole_passes: bool,
        rank: int,
        world_size: int,
        seed: int,
        shuffling: Shuffling | None = None,
    ):
        self._loader = loader
        self._whole_passes = whole_passes  # each epoch is one
        self._shuffling = shuffling
        self._is_first = True  # the next pass
        self._opened = False  # the next pass, by Keras as the last one ended
        self._ends = False  # the running pass, with the running epoch
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._by_sample = loader.batch_sampler is not None
        self._batches = loader.batch_sampler if self._by_sample else loader.sampler
        self._began: list[Any] = []  # states of the generators when the running pass began
        self._worker_seed = seed
        if len(self._batches) == 0:
            raise ConfigurationError("The DataLoader is empty. Expected at least one batch.")
        self.reads_ahead = loader.num_workers > 0
        self.reason = (
            "each replica loads only its own samples"
            if self._by_sample
            else "its dataset makes whole batches, so every replica makes each and keeps its part"
        )
        self.signature = f"{_KIND} of {len(self._batches)} batches over {len(loader.dataset)} items"

    @property
    def num_batches(self) -> int | None:
        return len(self._batches)

    @property
    def samples(self) -> int | None:
        """How many there are in a pass; None where the dataset makes whole batches."""
        return len(self._loader.dataset) if self._by_sample else None

    @property
    def sample(self) -> Array:
        """Numbers that the ranks must share: which items a `Subset` has, as after a random split, and a few values of
        tensors. Other datasets may give another value each time that they are asked, so nothing is compared."""
        from torch.utils.data import Subset, TensorDataset

        dataset, chosen = self._loader.dataset, None
        while isinstance(dataset, Subset):
            indices = np.asarray(dataset.indices)
            chosen = indices if chosen is None else indices[chosen]
            dataset = dataset.dataset
            if chosen.dtype.kind not in "iu":  # keys of the dataset's own
                break
        numbers = np.zeros(0)
        if chosen is not None:
            # Bytes, since samples are compared within a tolerance.
            numbers = np.frombuffer(_checksum_of_all(chosen).to_bytes(4, "little"), np.uint8).astype(np.float64)
        if type(dataset) is TensorDataset and len(dataset):
            rows = sampled_rows(len(dataset) if chosen is None else len(chosen))
            rows = rows if chosen is None else chosen[rows]
            taken = [to_numpy(tensor[rows]) for tensor in dataset.tensors]
            numbers = np.concatenate([numbers, numbers_of(taken)])
        return numbers

    def rows(self, key: int, batch: int) -> Any:
        """The numbers of the samples of a global batch."""
        return self._pass(key)[batch]

    def read(self, key: int, start: int, stop: int | None) -> Iterator[LocalShare]:
        if start == 0 and self._shuffling is not None:
            self.forget_order()  # each evaluation begins pass 0 anew
        chosen = self._pass(key)[start:stop]
        self._ends = stop is None or stop >= len(self._batches)
        return self._loaded(chosen)

    def _loaded(self, chosen: list[Any]) -> Iterator[LocalShare]:
        rank, world_size = self._rank, self._world_size
        if not self._by_sample:
            for element in _elements(self._rebuilt(chosen)):
                yield cut(element, rank, world_size, _KIND)
            return
        parts = [local_range(len(indices), rank, world_size) for indices in chosen]
        # An empty share loads one sample, as a stand-in.
        local = [
            indices[low:high] if low < high else indices[:1] for indices, (low, high) in zip(chosen, parts, strict=True)
        ]
        for element, indices, (low, high), own in zip(
            _elements(self._rebuilt(local)), chosen, parts, local, strict=True
        ):
            loaded = batch_size_of(element, _KIND)
            if loaded != len(own):
                raise ConfigurationError(
                    f"The DataLoader's collate_fn made a batch of {loaded} samples out of {len(own)}. It "
                    "must neither drop nor add samples, because the parts of all replicas must add up to the "
                    "global batch. Filter the dataset instead."
                )
            yield LocalShare(element, high - low, len(indices), _checksum(indices))

    def peek(self, *, restart: bool = False) -> LocalShare:
        generators = self._generators()
        states = [generator.get_state() for generator in generators]
        with _torch_state_restored(unless=restart and self._shuffling is not None):
            if self._shuffling is None:
                _seed(self._seed, 0)
            first = self._glance()
        if not restart:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        if not self._by_sample:
            return cut(next(_elements(self._rebuilt([first], 0))), self._rank, self._world_size, _KIND)
        low, high = local_range(len(first), self._rank, self._world_size)
        own = first[low:high] if low < high else first[:1]
        element = next(_elements(self._rebuilt([own], 0)))
        return LocalShare(element, high - low, len(first), _checksum(first))

    def on_epoch_begin(self) -> None:
        pass

    def on_epoch_end(self) -> None:
        if self._ends and self._shuffling is not None and data_adapters.opens_one_more_pass("torch"):
            self._open()
            self._opened = not self._whole_passes
            if self._loader.num_workers and self._whole_passes:
                next(iter(self._batches))  # its workers ask for batches at once
        self._ends = False

    def shares(self, world_size: int) -> list[str]:
        if not self._by_sample:
            return same_stream(self.kind, world_size)
        return [f"loads part {rank + 1} of {world_size} of each batch's samples" for rank in range(world_size)]

    def randomness(self, key: int | None) -> bytes:
        """What the order of a pass follows from beside the seed: the states of the program's generators before it.
        Empty where there are none.

        Args:
            key: of the pass that runs, or is to begin; None: of the next one.
        """
        runs = self._kept is not None and self._kept[0] == key
        states = self._began if runs else [generator.get_state() for generator in self._generators()]
        return encode([state.numpy() for state in states]) if states else b""

    def continue_with(self, randomness: bytes) -> None:
        """The pass that is read next is one of which `randomness` was this, on another rank or in a former life."""
        import torch

        states: Any = decode(randomness)
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(torch.from_numpy(state.copy()))
        self.forget_order()

    def _generators(self) -> list[Any]:
        """The program's own, as far as they can be seen: of the loader and of its samplers."""
        loader = self._loader
        holders = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        found = [generator for holder in holders if (generator := getattr(holder, "generator", None)) is not None]
        return list({id(generator): generator for generator in found}.values())

    def _pass(self, key: int) -> list[Any]:
        """The indices of each global batch of a pass."""
        batches: list[Any] = self._order_of(key, self._new_order)
        return batches

    def _new_order(self, key: int) -> list[Any]:
        self._began = [each.get_state() for each in self._generators()]
        if self._is_first and self._shuffling is not None and data_adapters.loaders_are_read_by_tf_data():
            self._glance()
        if not self._opened:
            self._open()
        self._is_first = self._opened = False
        batches = self._seeded_batches(key) if self._shuffling is None else self._agreed_batches(self._shuffling)
        return [list(batch) for batch in batches] if self._by_sample else batches

    def _open(self) -> None:
        """Each pass over a plain DataLoader draws its workers' seed first, then the sampler's order."""
        if self._has_generator:
            self._worker_seed = _draw(self._loader.generator)

    @property
    def _has_generator(self) -> bool:
        """Whether passes draw from a generator of the program's: the loader's own, else torch's."""
        return self._loader.generator is not None or self._shuffling is not None

    def _glance(self) -> Any:
        """The indices of the first batch of a pass that nobody goes on with."""
        self._open()
        return next(iter(self._batches))

    def _seeded_batches(self, key: int) -> list[Any]:
        with _torch_state_restored():
            _seed(self._seed, key)
            return self._all_batches()

    def _agreed_batches(self, shuffling: Shuffling) -> list[Any]:
        import torch

        state = shuffling.told(torch.get_rng_state().numpy().view(np.int64))
        if shuffling.is_chief:
            return self._all_batches()
        with _torch_state_restored():
            torch.set_rng_state(torch.from_numpy(np.array(state).view(np.uint8)))
            return self._all_batches()

    def _all_batches(self) -> list[Any]:
        batches = iter(self._batches)
        taken = list(itertools.islice(batches, len(self._batches)))
        if self._loader.num_workers or data_adapters.loaders_are_read_by_tf_data():
            # These find out that there is no batch more, as Keras, which counts, does not: samplers may draw then.
            next(batches, None)
        return taken

    def _worker_generator(self) -> Any:
        """Seeds this rank's workers, otherwise than those of other ranks; the program's generator, which the
        sampler shares, must not be drawn from once more."""
        import torch

        return torch.Generator().manual_seed((self._worker_seed + self._rank) % (1 << 63))

    def _rebuilt(self, batches: list[Any], num_workers: int | None = None) -> Any:
        """A DataLoader like the program's, over these batches."""
        from torch.utils.data import DataLoader

        loader = self._loader
        workers = loader.num_workers if num_workers is None else num_workers
        options: dict[str, Any] = {
            "num_workers": workers,
            "collate_fn": loader.collate_fn,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout if workers else 0,
            "worker_init_fn": loader.worker_init_fn,
            "generator": self._worker_generator() if self._has_generator else None,
        }
        if workers:
            # Not persistent_workers: this loader lives for one epoch.
            options["multiprocessing_context"] = loader.multiprocessing_context
            options["prefetch_factor"] = loader.prefetch_factor
        if self._by_sample:
            return DataLoader(loader.dataset, batch_sampler=batches, **options)
        return DataLoader(loader.dataset, batch_size=None, sampler=batches, **options)


def _draw(generator: Any) -> int:
    import torch

    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _seed(seed: int, key: int) -> None:
    """Let torch's global generator start from these."""
    import torch

    torch.default_generator.manual_seed(int(np.random.SeedSequence([seed, key]).generate_state(1)[0]))


@contextlib.contextmanager
def _torch_state_restored(*, unless: bool = False) -> Iterator[None]:
    """A context after which torch's global generator has the state that it had before, unless told otherwise."""
    import torch

    state = torch.get_rng_state()
    try:
        yield
    finally:
        if not unless:
            torch.set_rng_state(state)


def _elements(loader: Any) -> Iterator[Any]:
    for element in loader:
        # A collated batch is a list [x, y]; Keras makes a tuple of it.
        yield map_leaves(to_numpy, tuple(element) if isinstance(element, list) else element)


def _checksum_of_all(indices: Array) -> int:
    if indices.dtype.kind in "iu":
        return zlib.crc32(np.ascontiguousarray(indices, np.int64).tobytes())
    return zlib.crc32(repr(indices.tolist()).encode())


def _checksum(indices: list[Any]) -> int:
    return zlib.crc32(repr(list(itertools.islice(indices, 512))).encode(), len(indices))
