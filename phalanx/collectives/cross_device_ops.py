"""The algorithms that `cross_device_ops=` names, with `tf.distribute`'s argument names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from phalanx.collectives.communicator import Array, Communicator, ReduceOp
from phalanx.collectives.fusion_layout import ranges
from phalanx.collectives.host.argument_checks import native, output_arrays, scale_factors
from phalanx.collectives.reduction import cast, check_reducible, load, merge_rows, wire_dtype
from phalanx.errors import CollectiveMismatchError, ConfigurationError


class CrossDeviceOps(Protocol):
    """How a strategy merges arrays over its replicas."""

    def all_reduce(
        self,
        communicator: Communicator,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Like `Communicator.all_reduce`. Every rank must call it."""
        ...


_NAMES = ("HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice")


def cross_device_ops_of(value: object) -> CrossDeviceOps | None:
    """Convert a value of `cross_device_ops=` to an object of this module. Objects of `tf.distribute` are recognized by
    name. A class is instantiated without arguments, because programs often omit the parentheses.

    Raises: ConfigurationError for anything else.
    """
    if isinstance(value, type) and value.__name__ in _NAMES:
        value = value()
    if value is None or (not isinstance(value, type) and callable(getattr(value, "all_reduce", None))):
        return value  # type: ignore[return-value]
    name = type(value).__name__
    if name == "NcclAllReduce":
        NcclAllReduce()  # raises
    if name == "HierarchicalCopyAllReduce":
        return HierarchicalCopyAllReduce(num_packs=getattr(value, "_num_packs", 1))
    if name == "ReductionToOneDevice":
        return ReductionToOneDevice()
    raise ConfigurationError(
        f"cross_device_ops is {value!r}; it must be a HierarchicalCopyAllReduce, a ReductionToOneDevice, or None."
    )


class HierarchicalCopyAllReduce:
    """Merges within each host, then between hosts, as the communicator does by itself.

    Args:
        num_packs: Number of groups into which the arrays are divided. The arrays of a group are sent together.
    """

    def __init__(self, num_packs: int = 1):
        self.num_packs = _checked_packs(num_packs)

    def all_reduce(
        self,
        communicator: Communicator,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """See `CrossDeviceOps.all_reduce`."""
        if self.num_packs <= 1 or len(arrays) <= 1:
            return communicator.all_reduce(arrays, op, scale=scale, out=out)
        merged: list[Array] = []
        for start, stop in ranges(len(arrays), -(-len(arrays) // self.num_packs)):
            factor = scale if isinstance(scale, (int, float, np.number)) else scale[start:stop]
            merged += communicator.all_reduce(
                arrays[start:stop], op, scale=factor, out=None if out is None else out[start:stop]
            )
        return merged


class NcclAllReduce:
    """NVIDIA's NCCL. This version of Phalanx merges on the host, so creating one raises an error that says so.

    Raises: ConfigurationError, always.
    """

    def __init__(self, num_packs: int = 1):
        _checked_packs(num_packs)
        raise ConfigurationError(
            "NcclAllReduce needs GPUs, and this version of Phalanx merges values on the host only. Leave "
            "cross_device_ops out, or pass HierarchicalCopyAllReduce()."
        )


class ReductionToOneDevice:
    """Merges on one rank: the others send it their values, and it sends the result back.

    That rank transfers n times as many bytes as the others: useful for a custom merge function, not for speed.

    Args:
        reduce_to_device: Rank that merges, or a device name such as `cpu:1`, whose number is the rank. None for rank 0.
        accumulation_fn: Function that merges a list of arrays of equal shapes, one per rank in rank order, into one
            array. It receives floats of up to 16 bits as float32. `op` may then be SUM or MEAN, which divides the
            result by the number of ranks. None to merge by `op`.
    """

    def __init__(
        self,
        reduce_to_device: str | int | None = None,
        accumulation_fn: Callable[[list[Array]], Array] | None = None,
    ):
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn
        self._root = _rank_of(reduce_to_device)

    def all_reduce(
        self,
        communicator: Communicator,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """See `CrossDeviceOps.all_reduce`.

        Raises: ConfigurationError if `reduce_to_device` is not a rank of this job, or `accumulation_fn` is given with
            an unsupported op. If `accumulation_fn` raises, only that rank sees its error; the others see that it left.
        """
        if self._root >= communicator.world_size:
            raise ConfigurationError(
                f"reduce_to_device is {self.reduce_to_device!r}; the job has ranks 0 to {communicator.world_size - 1}."
            )
        if self.accumulation_fn is not None and op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ConfigurationError(f"accumulation_fn stands for the sum; it cannot be used with op {op.name}.")
        sources = [native(array) for array in arrays]
        for array in sources:
            check_reducible(array.dtype, op)
        factors = scale_factors(sources, op, scale)
        results = output_arrays("all_reduce", sources, out)
        _agree(communicator, op, sources)
        for source, factor, result in zip(sources, factors, results, strict=True):
            self._reduce(communicator, _scaled(source, factor), op, result)
        return communicator.broadcast(results, self._root, out=results)

    def _reduce(self, communicator: Communicator, source: Array, op: ReduceOp, result: Array) -> None:
        """Send `source`, in the wire dtype, to the root, which stores the merged arrays in `result`."""
        flat = source.reshape(-1)
        nothing = flat[:0]
        outgoing = [flat if rank == self._root else nothing for rank in range(communicator.world_size)]
        rows = communicator.all_to_all(outgoing)
        if communicator.rank != self._root:
            return
        divisor = communicator.world_size if op is ReduceOp.MEAN else 1
        if self.accumulation_fn is not None:
            merged = self.accumulation_fn([row.reshape(source.shape) for row in rows])
            np.copyto(result, merged if divisor == 1 else merged / divisor, casting="unsafe")
            return
        with np.errstate(all="ignore"):
            merge_rows(rows, result.reshape(-1), op, divisor)


def _agree(communicator: Communicator, op: ReduceOp, arrays: Sequence[Array]) -> None:
    """Raise CollectiveMismatchError on every rank if the ranks pass different arrays or operations. The all-to-all that
    sends the arrays would not detect it."""
    own = f"op={op.value}, " + ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
    requests = [one.decode() for one in communicator.all_gather_bytes(own.encode())]
    other = next((rank for rank, one in enumerate(requests) if one != requests[0]), None)
    if other is not None:
        raise CollectiveMismatchError(
            f"rank 0 called ReductionToOneDevice.all_reduce({requests[0]}); rank {other} called it with "
            f"({requests[other]}). "
            f"Every rank must call it with the same shapes, dtypes and op."
        )


def _scaled(array: Array, factor: float) -> Array:
    """`factor * array` in the wire dtype, in which the ranks' values are merged before rounding."""
    wire = wire_dtype(array.dtype)
    if factor == 1.0:
        return cast(array, wire)
    scaled = np.empty(array.shape, wire)
    with np.errstate(all="ignore"):
        load(array, factor, scaled)
    return scaled


def _rank_of(device: str | int | None) -> int:
    if device is None:
        return 0
    text = str(device).rpartition(":")[2]
    if not text.isdecimal():
        raise ConfigurationError(
            f"reduce_to_device is {device!r}; it must be a rank such as 0, or a device that ends in "
            f"one, such as 'cpu:0'."
        )
    return int(text)


def _checked_packs(num_packs: int) -> int:
    if num_packs < 0:
        raise ConfigurationError(f"num_packs is {num_packs}; it must be 0 (one pack) or more.")
    return num_packs
