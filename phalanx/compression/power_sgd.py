"""Low-rank compression: gradients of matrices as products of two thin matrices.

Vogels, Karimireddy and Jaggi 2019, PowerSGD: Practical low-rank gradient compression. One step of subspace iteration
for the sum M of all ranks' matrices, without any rank seeing M:

    P = sum of M_r Q        n x rank
    P = orthogonal(P)       the same on every rank
    Q = sum of M_r' P       m x rank
    M is about P Q'

M is first divided, and the product afterwards multiplied, by the recent root mean squares of the sums' rows and
columns: the factored second moments of Adafactor (Shazeer and Stern 2018), which are the same on every rank. For Adam,
small rows matter as much as large ones, but without scaling they would be sent last. (The code scales the thin matrices
instead, on the side that is multiplied with M.)

Q is kept for the next step (*warm start*), so that the iteration continues over the steps. Both sums are computed for
all matrices of the model at once, and are themselves compressed: down to 6 bits, a higher rank for the same bytes gains
more than fewer bits lose. Each factor is encoded column by column, because columns, the directions of the iteration,
differ in size by orders of magnitude; so the code transposes the factors. Vectors, and matrices too small to gain, are
sent with Q: another collective would cost more than it saves. The error feedback of a rank is the part of its matrix
missing from the sum, M_r - P Q_r', with Q_r as the other ranks decode it.

Matrices of one shape form a stack: operations on thin matrices are computed for the whole stack in one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache

import numpy as np

from phalanx.collectives.communicator import Array, Communicator
from phalanx.compression.base_compression import Compression, DType, Merged, State
from phalanx.compression.quantized import Int6
from phalanx.errors import ConfigurationError

RANK = 26
CHUNK = 128
"""Number of values of the factors that share a scale: no more than most columns have."""
SEED = 1
"""Seed of the first Q, which must be equal on all ranks."""
MIN_COMPRESSION = 2
"""Minimum factor by which the two factors must be smaller than the matrix. Small matrices get a lower rank."""
DECAY, FLOOR = 0.9, 0.01
"""Weight of the previous mean squares; minimum divisor of a row or column (1 is typical)."""
MIN_INDEPENDENCE = 0.03
"""Minimum length of the part of a unit row that is orthogonal to the rows before it, for 32-bit products to be
accurate."""
MIN_RANK_SHARE = 1 / 3
"""Minimum rank of a matrix, as a share of the configured rank. Below that, it loses more than it saves."""


@dataclass(frozen=True)
class _StackState:
    """The state of k matrices of shape (n, m) before a step, equal on all ranks.

    Attributes:
        right: Q' of the previous step, of shape (k, rank, m).
        rows: Running mean squares of the sums' rows, of shape (k, 1, n); zeros before the first step.
        columns: Running mean squares of the sums' columns, of shape (k, 1, m).
    """

    right: Array
    rows: Array
    columns: Array

    @classmethod
    def first(cls, count: int, shape: tuple[int, int], rank: int) -> _StackState:
        rows, columns = shape
        right = np.random.default_rng(SEED).standard_normal((count, rank, columns), np.float32)
        return cls(right, np.zeros((count, 1, rows), np.float32), np.zeros((count, 1, columns), np.float32))

    @classmethod
    def of(cls, state: State, shape: tuple[int, int]) -> _StackState:
        return cls(*(state[f"{_name(shape)}/{field.name}"] for field in fields(cls)))

    def state(self, shape: tuple[int, int]) -> dict[str, Array]:
        return {f"{_name(shape)}/{field.name}": getattr(self, field.name) for field in fields(self)}


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


class _Stack:
    """The matrices of one shape, in one step.

    Args:
        shape: Rows and columns, (n, m).
        indices: Positions of the matrices among the step's arrays.
        matrices: This rank's matrices.
        state: The state before the step.
    """

    def __init__(
        self, shape: tuple[int, int], indices: Sequence[int], matrices: Sequence[Array], state: _StackState
    ) -> None:
        self.shape, self.indices, self._matrices, self._state = shape, indices, matrices, state
        self._rows, self._columns = _relative_rms(state.rows), _relative_rms(state.columns)

    def left(self) -> Array:
        """This rank's part of P', of shape (k, rank, n)."""
        return _products(self._state.right / self._columns, [matrix.T for matrix in self._matrices]) / self._rows

    def right(self, left: Array) -> Array:
        """This rank's part of Q', of shape (k, rank, m), where P' is `left`."""
        return _products(left / self._rows, self._matrices) / self._columns

    def undivided_left(self, left: Array) -> Array:
        """P' for the unscaled matrices."""
        return left * self._rows

    def undivided_right(self, right: Array) -> Array:
        """Q' for the unscaled matrices."""
        return right * self._columns

    def next_state(self, right: Array, factors: tuple[Array, Array]) -> _StackState:
        """The state after a step with these factors of the sums. The mean squares do not need their product."""
        a, b = factors
        rows = DECAY * self._state.rows + (1 - DECAY) * _mean_squares(a, b)
        return _StackState(right, rows, DECAY * self._state.columns + (1 - DECAY) * _mean_squares(b, a))


def _products(thin: Array, matrices: Sequence[Array]) -> Array:
    """Multiply each of a stack of thin matrices by the corresponding one of `matrices`."""
    found = np.empty((*thin.shape[:2], matrices[0].shape[1]), np.float32)
    for index, matrix in enumerate(matrices):
        np.matmul(thin[index], matrix, out=found[index])
    return found


def _mean_squares(a: Array, b: Array) -> Array:
    """Mean squares of the rows of `a' b`, with shape (k, 1, n), for a of shape (k, rank, n)."""
    # Row i has the squared length a_i' (b b') a_i, which needs no n x m product. Rounding may make it negative.
    squares: Array = np.sum((b @ b.swapaxes(1, 2) @ a) * a, axis=1, keepdims=True) / b.shape[2]
    return np.maximum(squares, 0.0)


def _relative_rms(squares: Array) -> Array:
    """The divisors of rows or columns with these mean squares."""
    mean = squares.mean(axis=2, keepdims=True)
    # Before the first step, all are FLOOR, and a common factor has no effect.
    return np.maximum(np.sqrt(squares / np.where(mean > 0, mean, 1)), FLOOR)


@dataclass(frozen=True)
class PowerSGD:
    """See the module docstring. Arrays of more than two dimensions are reshaped to the matrix nearest to square.

    Args:
        rank: Rank of the approximation: bytes and accuracy grow with it. If the factors of a matrix would not be at
            least 2 times smaller, it gets the largest rank at which they are; if that is less than a third of `rank`,
            the matrix is summed whole, as vectors are.
        feedback: See `Compression.feedback`.
        factors: Compression of the two thin matrices and of arrays that are summed whole; None for 32 bits.
    """

    rank: int = RANK
    feedback: bool = True
    factors: Compression | None = field(default_factory=lambda: Int6(CHUNK))

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigurationError(f"PowerSGD got rank={self.rank}; it must be at least 1, for example {RANK}.")
        if self.factors is not None and not hasattr(self.factors, "all_reduce"):
            raise ConfigurationError(
                f"PowerSGD got factors={self.factors!r}; it must be a compression, such as Int8(), or None."
            )

    def takes(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """See `Compression.takes`: every array."""
        return True

    def rank_of(self, shape: tuple[int, ...]) -> int:
        """The rank for an array of this shape; 0 if it is summed whole."""
        rows, columns = matrix_shape(shape)
        rank = min(self.rank, rows * columns // max(1, MIN_COMPRESSION * (rows + columns)))
        return rank if rank >= MIN_RANK_SHARE * self.rank else 0

    def all_reduce(self, communicator: Communicator, arrays: Sequence[Array], state: State) -> Merged:
        """See `Compression.all_reduce`."""
        stacks = self._stacks(arrays, state)
        uncompressed = [index for index, array in enumerate(arrays) if not self.rank_of(array.shape)]
        with np.errstate(all="ignore"):
            lefts = [_orthogonal(p) for p in self._summed(communicator, [stack.left() for stack in stacks]).values]
            rights = [stack.right(left) for stack, left in zip(stacks, lefts, strict=True)]
            found = self._summed(communicator, [*rights, *(arrays[i] for i in uncompressed)])  # right factors first
            values = dict(zip(uncompressed, found.values[len(stacks) :], strict=True))
            own = dict(zip(uncompressed, found.own[len(stacks) :], strict=True))
            after: dict[str, Array] = {}
            for stack, left, right, mine in zip(stacks, lefts, found.values, found.own, strict=False):
                a, b = stack.undivided_left(left), stack.undivided_right(right)
                values |= zip(stack.indices, a.swapaxes(1, 2) @ b, strict=True)
                own |= zip(stack.indices, a.swapaxes(1, 2) @ stack.undivided_right(mine), strict=True)
                after |= stack.next_state(right, (a, b)).state(stack.shape)
        return Merged(
            [values[index].reshape(array.shape) for index, array in enumerate(arrays)],
            [own[index].reshape(array.shape) for index, array in enumerate(arrays)],
            after,
        )

    def _stacks(self, arrays: Sequence[Array], state: State) -> list[_Stack]:
        of: dict[tuple[int, int], list[int]] = {}
        for index, array in enumerate(arrays):
            if self.rank_of(array.shape):
                of.setdefault(matrix_shape(array.shape), []).append(index)
        # The state has all of these shapes or is empty: `CompressedReducer` keeps one per list of shapes.
        return [
            _Stack(
                shape,
                indices,
                [arrays[index].reshape(shape) for index in indices],
                _StackState.of(state, shape) if state else _StackState.first(len(indices), shape, self.rank_of(shape)),
            )
            for shape, indices in of.items()
        ]

    def _summed(self, communicator: Communicator, own: Sequence[Array]) -> Merged:
        """The sums over all ranks, and this rank's part of them."""
        if self.factors is None or not own:
            return Merged(communicator.all_reduce(own) if own else [], own, {})
        return self.factors.all_reduce(communicator, own, {})


@cache
def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of an array viewed as a matrix: its shape, split where the two are nearest to each other.

    >>> matrix_shape((3, 3, 16, 32))
    (144, 32)
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    cuts = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, len(shape))]
    return min(cuts, key=sum)


def _orthogonal(rows: Array) -> Array:
    """Orthonormal bases of the spans of the rows, for a stack of shape (k, rank, n); NaN if the rows are not finite.

    Computed from the Cholesky factor of the rows' products, several times as fast as a QR decomposition. This requires
    rows that are far from linearly dependent, as with a warm start.
    """
    # The sums are equal on all ranks. With different processors or BLAS libraries, the last bits may still differ.
    if not np.isfinite(rows).all():
        return np.full_like(rows, np.nan)
    # Unit length, so that the diagonal of the factor is the part of each row that is orthogonal to those before it.
    units = rows / np.linalg.norm(rows, axis=2, keepdims=True)
    try:
        lower = np.linalg.cholesky(units @ units.swapaxes(1, 2))
    except np.linalg.LinAlgError:
        lower = np.zeros((1, 1, 1), np.float32)
    bases: Array
    if np.diagonal(lower, axis1=1, axis2=2).min() > MIN_INDEPENDENCE:
        bases = np.linalg.inv(lower) @ units
    else:
        bases = np.linalg.qr(rows.swapaxes(1, 2))[0].swapaxes(1, 2)
    return bases
