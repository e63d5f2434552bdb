"""The description of a collective, on which all ranks must agree, and the running call."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import msgspec

from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.fusion_layout import FusionLayout, group_by_dtype
from phalanx.collectives.reduction import DType, check_reducible

MAX_OPERATIONS = 256
"""Number of prepared operations to keep. A training loop has a handful; varying batches keep creating new ones."""

ArrayKind = tuple[DType, tuple[int | str, ...]]
"""Dtype and shape of an array; `*` stands for a dimension that may differ between ranks."""


class CollectiveDescription(msgspec.Struct, frozen=True):
    """The properties that must be equal on all ranks, as text. Ranks compare its signature; errors show it.

    Attributes:
        name: Name of the called method.
        detail: Its other arguments, for example `op=sum` or `root=0`; may be empty.
        arrays: Dtype and shape of each array; see `describe_kind`.
    """

    name: str
    detail: str = ""
    arrays: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(self.arrays[:3]) + (", ..." if len(self.arrays) > 3 else "")
        arrays = f"{len(self.arrays)} array{'s' * (len(self.arrays) != 1)} [{shown}]" if self.arrays else ""
        return f"{self.name}({', '.join(filter(None, (self.detail, arrays)))})"


@dataclass(frozen=True, eq=False)
class Operation:
    """One kind of call, prepared once and used for all equal calls.

    Attributes:
        description: Description on which all ranks must agree.
        layouts: The arrays grouped by dtype; empty unless this is a reduction.
        nbytes: Bytes that each rank (in a broadcast: the root) contributes; 0 if they differ between calls.
    """

    description: CollectiveDescription
    layouts: tuple[FusionLayout, ...] = ()
    nbytes: int = 0

    @cached_property
    def signature(self) -> int:
        """A 64-bit digest of the description, never 0. Two different descriptions collide once in 10^19."""
        encoded = msgspec.msgpack.encode(self.description)
        # 0 marks packets without an operation (`Mesh.send_all`).
        return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") or 1


@lru_cache(MAX_OPERATIONS)
def prepare(name: str, detail: str = "", kinds: tuple[ArrayKind, ...] = (), nbytes: int = 0) -> Operation:
    """Prepare a collective without a reduction. Arguments as for `CollectiveDescription`."""
    return Operation(CollectiveDescription(name, detail, tuple(map(describe_kind, kinds))), nbytes=nbytes)


@lru_cache(MAX_OPERATIONS)
def prepare_all_reduce(op: ReduceOp, kinds: tuple[tuple[DType, tuple[int, ...]], ...]) -> Operation:
    """Prepare an all-reduce. Raises ConfigurationError for arrays that `op` cannot merge."""
    for dtype, _ in kinds:
        check_reducible(dtype, op)
    sizes = [math.prod(shape) for _, shape in kinds]
    return Operation(
        CollectiveDescription("all_reduce", f"op={op.value}", tuple(map(describe_kind, kinds))),
        group_by_dtype([dtype for dtype, _ in kinds], sizes),
        nbytes=sum(size * dtype.itemsize for size, (dtype, _) in zip(sizes, kinds, strict=True)),
    )


def kinds_of(arrays: Iterable[Array]) -> tuple[tuple[DType, tuple[int, ...]], ...]:
    """Dtype and shape of each array."""
    return tuple([(array.dtype, array.shape) for array in arrays])


def varying_kind(array: Array) -> ArrayKind:
    """Kind of an array whose first dimension may differ between ranks."""
    return array.dtype, ("*", *array.shape[1:]) if array.ndim else ()


def describe_kind(kind: ArrayKind) -> str:
    """Dtype and shape, for example `float32 (10, 4)`."""
    dtype, shape = kind
    return f"{dtype.name} ({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


@dataclass(slots=True)
class CollectiveCall:
    """A running collective.

    Attributes:
        number: Number of the collective on this communicator, starting at 1.
        operation: Operation that was called.
        started: Time of the call, by `time.monotonic()`.
        deadline: Time at which it times out, by `time.monotonic()`.
        signature: Signature of the operation.
    """

    number: int
    operation: Operation
    started: float
    deadline: float
    signature: int = field(init=False)

    def __post_init__(self) -> None:
        self.signature = self.operation.signature

    def __str__(self) -> str:
        return f"{self.operation.description} (collective {self.number})"


def explain_mismatch(descriptions: Mapping[int, CollectiveDescription | None]) -> str:
    """Return the message of a CollectiveMismatchError: the first difference, with rank and value on both sides.

    The reference is the call of most ranks (of the lowest rank, if two calls are equally frequent).

    Args:
        descriptions: Call of each rank; None if it is unknown because the rank left or hangs.
    """
    known = {rank: description for rank, description in sorted(descriptions.items()) if description}
    counts = Counter(known.values())
    reference = max(counts, key=lambda description: counts[description])
    reference_rank = next(rank for rank, description in known.items() if description == reference)
    differing = [rank for rank, description in known.items() if description != reference]
    if not differing:
        silent = ", ".join(str(rank) for rank, description in descriptions.items() if not description)
        return f"rank {reference_rank} called {reference}; rank {silent} called something else, and left or hangs."
    message = _difference(differing[0], known[differing[0]], reference_rank, reference)
    if len(differing) > 1:
        others = "; ".join(f"rank {other} called {known[other]}" for other in differing[1:4])
        message += f" Also: {others}{'; ...' if len(differing) > 4 else ''}."
    return message


def _difference(rank: int, mine: CollectiveDescription, reference_rank: int, reference: CollectiveDescription) -> str:
    both = f"rank {rank} called {mine}; rank {reference_rank} called {reference}."
    if mine.name != reference.name:
        return (
            f"{both} All ranks must call the same collectives in the same order. Look for a branch that only "
            f"some ranks take."
        )
    if mine.detail != reference.detail:
        return f"{both} All ranks must pass the same {mine.detail.partition('=')[0] or 'arguments'}."
    pairs = enumerate(zip(mine.arrays, reference.arrays, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(mine.arrays), len(reference.arrays)))
    if len(mine.arrays) != len(reference.arrays):
        return (
            f"{mine.name} on rank {rank} got {len(mine.arrays)} arrays; rank {reference_rank} brought "
            f"{len(reference.arrays)}. All ranks must pass the same arrays: the first difference is at array {index}. "
            f"Is the model the same on every rank, with the same layers frozen? And does each step do the same there, "
            f"with no update under a condition on the samples of one rank?"
        )
    return (
        f"{mine.name} on rank {rank} got {mine.arrays[index]} as array {index}; rank {reference_rank} "
        f"brought {reference.arrays[index]}. All ranks must pass equal shapes and dtypes. Pad or drop the "
        f"last partial batch, or look for what differs between the ranks."
    )
