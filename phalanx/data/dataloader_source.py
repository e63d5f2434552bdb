"""`torch.utils.data.DataLoader`: with a map-style dataset a rank loads and collates only its own samples.

Imported only when an input is a DataLoader, so PyTorch is already loaded.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from phalanx.arrays.tree import map_leaves
from phalanx.data.array_source import sample_values, sampled_rows
from phalanx.data.batch_split import LocalBatch, local_range, split_share
from phalanx.data.dataloader_order import DataLoaderOrder
from phalanx.data.dataset_elements import Array, to_numpy
from phalanx.data.input_request import InputRequest
from phalanx.data.rank_local_reads import drawing_samples
from phalanx.data.sharding_policy import AutoShardPolicy
from phalanx.data.source import Source, SourceTraits, StreamSource
from phalanx.errors import ConfigurationError

_KIND = "torch DataLoader"
_END = object()


def make_source(request: InputRequest) -> MapStyleSource | StreamSource:
    """Create the source of a DataLoader whose batches are the global batches.

    A loader with a `DistributedSampler` of this job's size already reads this rank's data. It is used unchanged, with
    its batch size as the local batch size.

    Raises: ConfigurationError for a DistributedSampler of another size or rank, or an empty loader.
    """
    loader, rank, world_size = request.x, request.rank, request.world_size
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        if (sampler.num_replicas, sampler.rank) != (world_size, rank):
            raise ConfigurationError(
                f"The DataLoader's DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, "
                f"but this is rank {rank} of {world_size}. Leave the sampler out (shuffle=True is enough: "
                "the global batches are cut for you), or make it with this job's size and rank."
            )
        traits = SourceTraits(
            f"{_KIND} with a DistributedSampler",
            signature=f"{_KIND} of {len(loader)} batches of one rank",
            reason="its sampler has divided the samples already, and its batch size is that of one replica",
            policy=AutoShardPolicy.OFF,
            is_compared=False,
            is_read_by_all_ranks=False,
            draws_as_keras=True,
            describe_share=lambda rank, _: f"reads the samples of its sampler, shard {rank} of {world_size}",
        )
        return StreamSource(
            lambda key: _rank_local_elements(loader, _open_rank_local(loader)), traits, request, num_batches=len(loader)
        )
    batches = sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or not hasattr(batches, "__len__"):
        traits = SourceTraits(
            _KIND,
            signature=_KIND,
            reason="its dataset can only be read in order, so every replica reads it and keeps its part",
            draws_as_keras=True,
        )
        return StreamSource(lambda key: _elements(loader), traits, request)
    return MapStyleSource(request)


class MapStyleSource(Source):
    """A DataLoader over a dataset with `__getitem__`.

    `DataLoaderOrder` determines the samples of each global batch. If PyTorch's own `collate_fn` stacks the samples,
    this rank's loader gets only its part of their indices. Any other `collate_fn` gets whole global batches: it may pad
    to the longest sample, or drop samples.
    """

    order: DataLoaderOrder

    def __init__(self, request: InputRequest):
        super().__init__(request)
        self._loader = loader = request.x
        self.order = DataLoaderOrder(request)
        self._loads_own_samples = self.order.is_by_sample and loader.collate_fn is default_collate
        self.num_batches = len(self.order.batches)
        if self.num_batches == 0:
            raise ConfigurationError("The DataLoader is empty. Expected at least one batch.")
        self.samples = len(loader.dataset) if self.order.is_by_sample else None  # else the dataset makes whole batches
        self.traits = SourceTraits(
            _KIND,
            signature=f"{_KIND} of {self.num_batches} batches over {len(loader.dataset)} items",
            reason=(
                "each replica loads only its own samples"
                if self._loads_own_samples
                else "it makes whole batches, so every replica makes each and keeps its part"
            ),
            is_read_by_all_ranks=not self._loads_own_samples,
            is_uniform=True,
            draws_as_keras=True,
            may_end_early=not _has_known_samplers(loader),
            describe_share=_describe_own_samples if self._loads_own_samples else None,
        )

    @property
    def sampled_values(self) -> Array:
        """See `Source.sampled_values`. Covers the indices of a `Subset`, such as from a random split, and a few values
        of tensors. Other datasets may return different values on each read, so nothing of them is compared."""
        dataset, chosen = self._loader.dataset, None
        while isinstance(dataset, Subset):
            indices = np.asarray(dataset.indices)
            chosen = indices if chosen is None else indices[chosen]
            dataset = dataset.dataset
            if chosen.dtype.kind not in "iu":  # custom keys of the dataset
                break
        numbers = np.zeros(0)
        if chosen is not None:
            # Bytes, because ranks compare numbers within a tolerance.
            numbers = np.frombuffer(_checksum_of_all(chosen).to_bytes(4, "little"), np.uint8).astype(np.float64)
        if type(dataset) is TensorDataset and len(dataset):
            rows = sampled_rows(len(dataset) if chosen is None else len(chosen))
            rows = rows if chosen is None else chosen[rows]
            numbers = np.concatenate([numbers, sample_values([to_numpy(tensor[rows]) for tensor in dataset.tensors])])
        return numbers

    def rows(self, key: int, batch: int) -> list[Any]:
        keys: list[Any] = self.order.batches_of_pass(key, batch + 1)[batch]
        return keys

    def read(self, key: int, start: int, stop: int | None) -> Iterator[LocalBatch]:
        return self._load(self.order.batches_of_pass(key, stop)[start:stop], start)

    def peek(self, *, restart: bool = False) -> LocalBatch:
        return next(self._load([self.order.peek(restart=restart)], 0, num_workers=0))

    def _load(self, chosen: list[Any], start: int, num_workers: int | None = None) -> Iterator[LocalBatch]:
        """Yield this rank's shares of global batches, given by their sample indices; the first is batch `start`."""
        rank, world_size = self._rank, self._world_size
        if not self._loads_own_samples:
            for element in _elements(self._loader_of(chosen, start, num_workers)):
                yield split_share(element, rank, world_size, _KIND, copies=True)
            return
        parts = [local_range(len(indices), rank, world_size) for indices in chosen]
        # An empty share loads one sample as a placeholder.
        local = [
            indices[low:high] if low < high else indices[:1] for indices, (low, high) in zip(chosen, parts, strict=True)
        ]
        loader = self._loader_of(local, start, num_workers)
        elements = _rank_local_elements(loader, iter(loader))
        # The fingerprint covers the indices, because no rank has the whole batch.
        for element, indices, (low, high) in zip(elements, chosen, parts, strict=True):
            yield LocalBatch(element, high - low, len(indices), _checksum(indices))

    def _loader_of(self, batches: list[Any], start: int, num_workers: int | None) -> Any:
        """Create a DataLoader like the program's over these batches; the first is batch `start`."""
        loader = self._loader
        workers = loader.num_workers if num_workers is None else num_workers
        options: dict[str, Any] = {
            "num_workers": workers,
            "collate_fn": loader.collate_fn,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout if workers else 0,
            "worker_init_fn": loader.worker_init_fn,
            "generator": self.order.worker_generator(start, self._rank if self._loads_own_samples else 0),
        }
        if workers:
            # Not persistent_workers: this loader lives for one epoch.
            options["multiprocessing_context"] = loader.multiprocessing_context
            options["prefetch_factor"] = loader.prefetch_factor
        if self.order.is_by_sample:
            return DataLoader(loader.dataset, batch_sampler=batches, **options)
        return DataLoader(loader.dataset, batch_size=None, sampler=batches, **options)


def _describe_own_samples(rank: int, world_size: int) -> str:
    return f"loads part {rank + 1} of {world_size} of each batch's samples"


def _has_known_samplers(loader: DataLoader[Any]) -> bool:
    """Whether all samplers are PyTorch's own, which yield as many batches as their length says."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return all(each is None or type(each).__module__.startswith("torch.") for each in samplers)


def _elements(loader: Any) -> Iterator[Any]:
    return map(_standardized, loader)


def _open_rank_local(loader: Any) -> Iterator[Any]:
    """Open an iterator over a loader that no other rank opens. Opening draws a seed."""
    with drawing_samples():
        return iter(loader)


def _rank_local_elements(loader: Any, elements: Iterator[Any]) -> Iterator[Any]:
    """Yield the elements of a loader's iterator whose samples no other rank loads."""
    loading = drawing_samples if _may_draw(loader) else nullcontext
    while True:
        with loading():
            element = next(elements, _END)
        if element is _END:
            return
        yield _standardized(element)


def _may_draw(loader: Any) -> bool:
    """Whether loading samples may draw random numbers in this process."""
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return not loader.num_workers and type(dataset) is not TensorDataset


def _standardized(element: Any) -> Any:
    # A collated batch is a list [x, y]; Keras turns it into a tuple.
    return map_leaves(to_numpy, tuple(element) if isinstance(element, list) else element)


def _checksum_of_all(indices: Array) -> int:
    if indices.dtype.kind in "iu":
        return zlib.crc32(np.ascontiguousarray(indices, np.int64).tobytes())
    return zlib.crc32(repr(indices.tolist()).encode())


def _checksum(indices: list[Any]) -> int:
    return zlib.crc32(repr(list(itertools.islice(indices, 512))).encode(), len(indices))
