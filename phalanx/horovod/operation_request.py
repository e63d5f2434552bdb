"""What a rank asks for under a name, and in which words two ranks differ. All pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, Any]

VARYING = -1
"""Stands for a first dimension that may differ between the ranks."""


class OperationKind(enum.StrEnum):
    """The collectives."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"


class HorovodOp(enum.StrEnum):
    """How values of several ranks become one."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What must be equal on all ranks that ask under one name.

    Attributes:
        name: tells operations that are under way at the same time apart.
        kind: a `OperationKind`.
        dtypes: of the arrays, which travel together.
        shapes: theirs; `VARYING` where a first dimension may differ.
        op: an `HorovodOp`, for reductions.
        root: for broadcasts.
        prescale: factor before the reduction.
        postscale: factor after it.
        detail: anything else that must agree, as text.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    detail: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays on one rank; varying dimensions count as 1."""
        total = 0
        for name, shape in zip(self.dtypes, self.shapes, strict=True):
            total += dtype_of(name).itemsize * int(np.prod([max(n, 1) if n == VARYING else n for n in shape]))
        return total

    def __str__(self) -> str:
        details = [self.op, self.detail]
        if self.kind == OperationKind.BROADCAST:
            details.append(f"root rank {self.root}")
        if (self.prescale, self.postscale) != (1.0, 1.0):
            details.append(f"scaled by {self.prescale:g} before and {self.postscale:g} after")
        arrays = [_array(*both) for both in zip(self.dtypes[:3], self.shapes[:3], strict=True)]
        more = [f"{len(self.dtypes) - 3} more"] if len(self.dtypes) > 3 else []
        return f"{self.kind}({', '.join(filter(None, (*details, *arrays, *more)))})"


def difference(name: str, brought: Sequence[tuple[int, Request]]) -> str:
    """Why the ranks' requests of one name do not fit together; empty if they do.

    Args:
        brought: rank and request, in rank order.
    """
    (first_rank, first), *others = brought
    for rank, other in others:
        if other != first:
            return f"{_what_differs(name, first_rank, first, rank, other)} All ranks must ask for the same."
    return ""


def _what_differs(name: str, first_rank: int, first: Request, rank: int, other: Request) -> str:
    both = f"rank {first_rank} asked for {first}, rank {rank} for {other}."
    if first.kind != other.kind:
        return f"Mismatched operations for {name!r}: {both}"
    if first.op != other.op or first.detail != other.detail:
        return f"Mismatched arguments for {name!r}: {both}"
    if first.root != other.root:
        return f"Mismatched root ranks for {name!r}: {both}"
    if len(first.dtypes) != len(other.dtypes):
        counts = f"rank {first_rank} brought {len(first.dtypes)} tensors, rank {rank} {len(other.dtypes)}."
        return f"Mismatched groups for {name!r}: {counts}"
    for index, (left, right) in enumerate(zip(first.dtypes, other.dtypes, strict=True)):
        if left != right:
            return f"Mismatched data types for {name!r}{_tensor(index, first)}: {both}"
    for index, (one, two) in enumerate(zip(first.shapes, other.shapes, strict=True)):
        if one != two:
            shapes = f"rank {first_rank} brought {_shape(one)}, rank {rank} {_shape(two)}."
            return f"Mismatched shapes for {name!r}{_tensor(index, first)}: {shapes}"
    return f"Mismatched scale factors for {name!r}: {both}"


_DTYPES: dict[str, np.dtype[Any]] = {}
_NAMES: dict[np.dtype[Any], str] = {}


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of this name; also those of ml_dtypes (bfloat16), which NumPy knows once they are imported."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        import ml_dtypes  # registers them

        dtype = _DTYPES[name] = np.dtype(getattr(ml_dtypes, name, name))
    return dtype


def name_of(dtype: np.dtype[Any]) -> str:
    """`dtype.name`, which NumPy forms anew each time at some cost."""
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = dtype.name
    return name


def _tensor(index: int, request: Request) -> str:
    return f", tensor {index}" if len(request.dtypes) > 1 else ""


def _array(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {_shape(shape)}"


def _shape(shape: Sequence[int]) -> str:
    return str(tuple(shape)).replace(str(VARYING), "*")
