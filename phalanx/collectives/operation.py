"""What a rank calls: the description that all ranks must share, and the running call itself."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from phalanx.collectives.fusion_layout import FusionLayout


class CollectiveDescription(msgspec.Struct, frozen=True):
    """What must be equal on all ranks, in words: it is compared by its signature and shown in errors.

    Attributes:
        name: the method that was called.
        detail: its other arguments, for example `op=sum` or `root=0`; may be empty.
        arrays: dtype and shape of each array; `*` stands for a dimension that may differ.
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
    """One kind of call, prepared once and used for every call like it.

    Attributes:
        description: what all ranks must agree on.
        layouts: for reductions, the arrays grouped by dtype.
        shapes: for reductions, the arrays' shapes.
        nbytes: what each rank brings, or root; 0 where that differs between calls.
    """

    description: CollectiveDescription
    layouts: tuple[FusionLayout, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = field(default=())
    nbytes: int = 0

    @cached_property
    def signature(self) -> int:
        """A 64-bit digest of the description, never 0. Two that differ collide once in 10^19."""
        encoded = msgspec.msgpack.encode(self.description)
        return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") or 1


@dataclass(slots=True)
class CollectiveCall:
    """One running collective.

    Attributes:
        number: counts the collectives of this communicator, from 1.
        operation: what was called.
        started: a value of `time.monotonic()`.
        deadline: likewise.
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
    """The message of a CollectiveMismatchError: the first difference, with rank and value on both sides.

    The side that most ranks take is the reference (the one with the lowest rank, if two are equal).

    Args:
        descriptions: what each rank called; None for one that left without saying.
    """
    known = {rank: description for rank, description in sorted(descriptions.items()) if description}
    counts = Counter(known.values())
    reference = max(counts, key=lambda description: counts[description])
    reference_rank = next(rank for rank, description in known.items() if description == reference)
    differing = [rank for rank, description in known.items() if description != reference]
    if not differing:
        silent = ", ".join(str(rank) for rank, description in descriptions.items() if not description)
        return f"rank {reference_rank} called {reference}; rank {silent} called something else and left."
    rank = differing[0]
    lines = [_difference(rank, known[rank], reference_rank, reference)]
    if len(differing) > 1:
        others = "; ".join(f"rank {other} called {known[other]}" for other in differing[1:4])
        lines.append(f"Also: {others}{'; ...' if len(differing) > 4 else ''}.")
    return " ".join(lines)


def _difference(rank: int, mine: CollectiveDescription, reference_rank: int, reference: CollectiveDescription) -> str:
    both = f"rank {rank} called {mine}; rank {reference_rank} called {reference}."
    if mine.name != reference.name:
        return (
            f"{both} All ranks must call the same collectives in the same order. Look for a branch that only "
            f"some ranks take."
        )
    if mine.detail != reference.detail:
        return f"{both} All ranks must pass the same {mine.detail.partition('=')[0] or 'arguments'}."
    if len(mine.arrays) != len(reference.arrays):
        return (
            f"{mine.name} on rank {rank} got {len(mine.arrays)} arrays; rank {reference_rank} brought "
            f"{len(reference.arrays)}. All ranks must pass the same arrays: {_both(mine, reference)} Is the "
            f"model the same on every rank, with the same layers frozen?"
        )
    index = next(i for i, (a, b) in enumerate(zip(mine.arrays, reference.arrays, strict=True)) if a != b)
    return (
        f"{mine.name} on rank {rank} got {mine.arrays[index]} as array {index}; rank {reference_rank} "
        f"brought {reference.arrays[index]}. All ranks must pass equal shapes and dtypes. Pad or drop the "
        f"last partial batch, or look for what differs between the ranks."
    )


def _both(mine: CollectiveDescription, reference: CollectiveDescription) -> str:
    extra = _first_extra(mine.arrays, reference.arrays)
    return f"the first difference is at array {extra}."


def _first_extra(mine: Sequence[str], reference: Sequence[str]) -> int:
    shorter = min(len(mine), len(reference))
    return next((index for index in range(shorter) if mine[index] != reference[index]), shorter)
