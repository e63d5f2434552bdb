"""Requests by name, and messages about ranks whose requests differ. Pure functions."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, Any]

VARYING = -1
"""Represents a first dimension that may differ between ranks."""


class OperationKind(enum.StrEnum):
    """The collectives."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"


class HorovodOp(enum.StrEnum):
    """The reductions of the values of several ranks to one."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


class Request(msgspec.Struct, frozen=True, array_like=True):
    """The properties of a request that must be equal on all ranks.

    Attributes:
        name: Identifier among the operations in progress.
        kind: An `OperationKind`.
        dtypes: Names of the dtypes of the arrays, which travel together.
        shapes: Shapes of the arrays; `VARYING` for a first dimension that may differ.
        op: A `HorovodOp`, for reductions.
        root: Source of a broadcast, by its position in the process set.
        prescale: Factor before a reduction.
        postscale: Factor after a reduction.
        detail: Anything else that must be equal, as text.
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
        """Bytes of the arrays on one rank; a varying dimension counts as 1."""
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


_ON_GRADIENTS = (
    " The gradient of an embedding may be sparse on one rank, and dense zeros where no batch has reached it yet: pass "
    "sparse_as_dense=True."
)


def describe_mismatch(name: str, requests: Sequence[tuple[int, Request]]) -> str:
    """Describe how the ranks' requests with one name differ; empty if they do not.

    Args:
        name: Name of the operation.
        requests: Pairs of a rank and its request, in rank order.
    """
    (first_rank, first), *others = requests
    for rank, other in others:
        if other != first:
            return f"{_what_differs(name, first_rank, first, rank, other)} All ranks must request the same."
    return ""


def _what_differs(name: str, first_rank: int, first: Request, rank: int, other: Request) -> str:
    both = f"rank {first_rank} requested {first}, rank {rank} {other}."
    if first.kind != other.kind:
        return f"Mismatched operations for {name!r}: {both}"
    if first.op != other.op or first.detail != other.detail:
        return f"Mismatched arguments for {name!r}: {both}"
    if first.root != other.root:
        return f"Mismatched root ranks for {name!r}: {both}"
    if len(first.dtypes) != len(other.dtypes):
        counts = f"rank {first_rank} has {len(first.dtypes)} tensors, rank {rank} has {len(other.dtypes)}."
        advice = _ON_GRADIENTS if ".gradients." in name else ""
        return f"Mismatched groups for {name!r}: {counts}{advice}"
    for index, (left, right) in enumerate(zip(first.dtypes, other.dtypes, strict=True)):
        if left != right:
            return f"Mismatched data types for {name!r}{_tensor(index, first)}: {both}"
    for index, (one, two) in enumerate(zip(first.shapes, other.shapes, strict=True)):
        if one != two:
            shapes = f"rank {first_rank} has {_shape(one)}, rank {rank} has {_shape(two)}."
            return f"Mismatched shapes for {name!r}{_tensor(index, first)}: {shapes}"
    return f"Mismatched scale factors for {name!r}: {both}"


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype with this name, including those of ml_dtypes (bfloat16)."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return `dtype.name`, cached because NumPy computes it at every access."""
    return dtype.name


def _tensor(index: int, request: Request) -> str:
    return f", tensor {index}" if len(request.dtypes) > 1 else ""


def _array(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {_shape(shape)}"


def _shape(shape: Sequence[int]) -> str:
    return str(tuple(shape)).replace(str(VARYING), "*")
