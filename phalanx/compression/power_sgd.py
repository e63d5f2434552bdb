"""Gradients of matrices as products of two thin ones.

Vogels, Karimireddy and Jaggi 2019, PowerSGD: Practical low-rank gradient compression. One step of subspace iteration
for the sum M of all ranks' matrices, without anybody seeing M:

    P = sum of M_r Q        n x rank
    P = orthogonal(P)       the same on every rank
    Q = sum of M_r' P       m x rank
    M is about P Q'

M is divided beforehand, and the product multiplied afterwards, by the root mean squares that the sums' rows and columns
have had lately: the factored second moments of Adafactor (Shazeer and Stern 2018), which are the same on every rank.
What is small beside the rest is as much to Adam as what is large, and would be the last to travel. (In the code it is
the thin matrices that are scaled, on the side that meets M.)

Q is kept for the next step (*warm start*), so that the iteration goes on over the steps. Both sums are made for all
matrices of the model at once, and travel compressed themselves: for the same bytes twice the rank at 8 bits leads
further than 16 bits. Each factor goes column by column, since columns, the directions of the iteration, differ in size
by orders of magnitude. What a rank's own part of the sum lacks, M_r - P Q_r' with Q_r as the others have understood it,
is its error feedback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.collectives.communicator import Array, Communicator
from phalanx.compression.protocol import Compression, DType, Merged, State
from phalanx.compression.quantised import Int8
from phalanx.errors import ConfigurationError

RANK = 24
SEED = 1
"""Of the first Q, which must be the same on all ranks."""
WORTH = 2
"""How many times smaller the two factors must be than the matrix: a small one has a lower rank."""
DECAY, FLOOR = 0.9, 0.01
"""How much the mean squares of a step before count; the least that a row or column is divided by, where 1 is usual."""
LEAST = 1 / 3
"""Of the rank: a matrix for which it would be lower still is not worth what is lost."""


@dataclass(frozen=True)
class _Memory:
    """What is known of a matrix when a step begins; the same on every rank.

    Attributes:
        right: Q of the step before.
        rows: running mean squares of the sums' rows, of shape (n, 1); None before the first step.
        columns: of their columns, of shape (m, 1).
    """

    right: Array
    rows: Array | None
    columns: Array | None

    @classmethod
    def of(cls, state: State, index: int) -> _Memory:
        return cls(state[f"{index}"], state[f"{index}/rows"], state[f"{index}/columns"])

    def state(self, index: int) -> dict[str, Array]:
        assert self.rows is not None
        assert self.columns is not None
        return {f"{index}": self.right, f"{index}/rows": self.rows, f"{index}/columns": self.columns}

    def scales(self) -> tuple[Array, Array]:
        """What the matrix's rows and columns are divided by."""
        if self.rows is None or self.columns is None:
            return np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)
        return _beside_the_mean(self.rows), _beside_the_mean(self.columns)

    def after(self, right: Array, factors: tuple[Array, Array]) -> _Memory:
        """After a step that has come to the product of these, whose mean squares need no product."""
        a, b = factors
        rows, columns = _mean_squares(a, b), _mean_squares(b, a)
        if self.rows is not None and self.columns is not None:
            rows = DECAY * self.rows + (1 - DECAY) * rows
            columns = DECAY * self.columns + (1 - DECAY) * columns
        return _Memory(right, rows, columns)


def _mean_squares(a: Array, b: Array) -> Array:
    """Of the rows of `a b'`, of shape (n, 1)."""
    squares: Array = np.sum((a @ (b.T @ b)) * a, axis=1, keepdims=True)
    return np.maximum(squares, 0.0) / len(b)


def _beside_the_mean(squares: Array) -> Array:
    mean = squares.mean()
    return np.maximum(np.sqrt(squares / mean), FLOOR) if mean > 0 else np.ones_like(squares)


@dataclass(frozen=True)
class PowerSGD:
    """See the top of this file. Arrays of more than two dimensions count as the matrix that is nearest to square.

    Args:
        rank: of the approximation: the bytes grow with it, and so does the accuracy. A matrix that it would not make at
            least 2 times smaller has the rank that does; if that is less than a third of it, the matrix goes as it is,
            as vectors do.
        factors: how the two thin matrices travel; None: in 32 bits.
    """

    rank: int = RANK
    feedback: bool = True
    factors: Compression | None = field(default_factory=Int8)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigurationError(f"PowerSGD got rank={self.rank}; it must be at least 1, for example 24.")
        if self.factors is not None and not hasattr(self.factors, "all_reduce"):
            raise ConfigurationError(
                f"PowerSGD got factors={self.factors!r}; it must be a compression, such as Int8(), or None."
            )

    def takes(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """See `Compression.takes`."""
        return self._rank_of(matrix_shape(shape)) >= LEAST * self.rank

    def _rank_of(self, shape: tuple[int, int]) -> int:
        rows, columns = shape
        return min(self.rank, rows * columns // (WORTH * (rows + columns)))

    def all_reduce(self, communicator: Communicator, arrays: Sequence[Array], state: State) -> Merged:
        """See `Compression.all_reduce`."""
        matrices = [array.reshape(matrix_shape(array.shape)) for array in arrays]
        memories = [_Memory.of(state, index) for index in range(len(arrays))] if state else self._first(matrices)
        with np.errstate(all="ignore"):
            scales = [memory.scales() for memory in memories]
            known = zip(matrices, memories, scales, strict=True)
            sums, _ = self._summed(communicator, [m @ (memory.right / c) / r for m, memory, (r, c) in known])
            left = [_orthogonal(p) for p in sums]
            found = zip(matrices, left, scales, strict=True)
            right, own = self._summed(communicator, [m.T @ (p / r) / c for m, p, (r, c) in found])
            factors = [(p * r, q * c) for p, q, (r, c) in zip(left, right, scales, strict=True)]
            values = [a @ b.T for a, b in factors]
            parts = [(p * r) @ (q * c).T for p, q, (r, c) in zip(left, own, scales, strict=True)]
            after = [memory.after(q, ab) for memory, q, ab in zip(memories, right, factors, strict=True)]
        return Merged(
            [value.reshape(array.shape) for value, array in zip(values, arrays, strict=True)],
            [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)],
            {name: array for index, memory in enumerate(after) for name, array in memory.state(index).items()},
        )

    def _summed(self, communicator: Communicator, own: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """The sums of thin matrices over all ranks, and what of this rank's own is in them."""
        if self.factors is None:
            return communicator.all_reduce(own), list(own)
        columns = [np.ascontiguousarray(matrix.T) for matrix in own]
        merged = self.factors.all_reduce(communicator, columns, {})
        return [value.T for value in merged.values], [value.T for value in merged.own]

    def _first(self, matrices: Sequence[Array]) -> list[_Memory]:
        random = np.random.default_rng(SEED)
        right = [random.standard_normal((m.shape[1], self._rank_of(m.shape)), np.float32) for m in matrices]
        return [_Memory(q, None, None) for q in right]


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of an array seen as a matrix: its shape cut where they are nearest to each other.

    >>> matrix_shape((3, 3, 16, 32))
    (144, 32)
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    cuts = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, len(shape))]
    return min(cuts, key=sum)


def _orthogonal(columns: Array) -> Array:
    """An orthonormal basis of the columns; not finite if they are not."""
    if not np.isfinite(columns).all():
        return np.full_like(columns, np.nan)
    basis: Array = np.linalg.qr(columns)[0]
    return basis
