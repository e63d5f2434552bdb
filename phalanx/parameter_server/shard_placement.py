"""Placement of variables on servers, in shards. Pure functions: every task computes the same placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.errors import ConfigurationError
from phalanx.parameter_server.partitioners import Partitioner

Array = np.ndarray[Any, Any]


class PlacedVariable(msgspec.Struct, frozen=True):
    """A trainable variable of the model, the same on all tasks."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"`{self.path}` {self.dtype}{list(self.shape)}"


class Shard(msgspec.Struct, frozen=True):
    """Rows `start` to `stop` of variable number `variable`, on server number `server`; a scalar is one row."""

    variable: int
    start: int
    stop: int
    server: int


def place_shards(
    variables: Sequence[PlacedVariable], servers: int, partitioner: Partitioner | None = None
) -> tuple[Shard, ...]:
    """Cut the variables into shards, and place them so that the servers store about the same number of bytes.

    The shards are placed in order of decreasing size, each on the server with the fewest bytes so far. The fullest
    server then stores at most a third more than in an optimal placement. In TensorFlow 1, `replica_device_setter` with
    a load-balancing strategy did the same; variables of equal size are placed round-robin.

    Args:
        variables: The trainable variables, in the model's order.
        servers: Number of servers.
        partitioner: Function that returns the number of pieces of a variable; None: variables are not cut.

    Returns: the shards in the order of their variables and rows.

    Raises: ConfigurationError if the partitioner returns an invalid number of pieces.

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (longest processing time first).
    """
    pieces = [
        (index, start, stop)
        for index, variable in enumerate(variables)
        for start, stop in _cuts(variable, _pieces(variable, partitioner))
    ]
    loads = [0] * servers
    owner: dict[tuple[int, int, int], int] = {}
    for piece in sorted(pieces, key=lambda piece: -_bytes(variables[piece[0]], piece[2] - piece[1])):
        server = loads.index(min(loads))
        owner[piece] = server
        # At least 1, so that shards without bytes are spread too.
        loads[server] += max(1, _bytes(variables[piece[0]], piece[2] - piece[1]))
    return tuple(Shard(index, start, stop, owner[index, start, stop]) for index, start, stop in pieces)


def rows_of_shard(array: Array, shard: Shard) -> Array:
    """A shard of a variable's array, as a view."""
    return array[shard.start : shard.stop] if array.ndim else array


def shard_shape(variable: PlacedVariable, shard: Shard) -> tuple[int, ...]:
    return (shard.stop - shard.start, *variable.shape[1:]) if variable.shape else ()


def _pieces(variable: PlacedVariable, partitioner: Partitioner | None) -> int:
    if partitioner is None or not variable.shape:
        return 1
    answer = list(partitioner(variable.shape, variable.dtype))
    if len(answer) != len(variable.shape) or any(n != 1 for n in answer[1:]) or not answer[0] >= 1:
        raise ConfigurationError(
            f"variable_partitioner returned {answer} for {variable}. It must return one number for each axis, of which "
            f"all but the first are 1: variables are cut along their first axis only."
        )
    return min(answer[0], max(1, variable.shape[0]))


def _cuts(variable: PlacedVariable, pieces: int) -> list[tuple[int, int]]:
    """First and last row of each piece. The numbers of rows differ by at most one; the first pieces have more."""
    length = variable.shape[0] if variable.shape else 1
    base, extra = divmod(length, pieces)
    starts = [piece * base + min(piece, extra) for piece in range(pieces + 1)]
    return list(itertools.pairwise(starts))


def _bytes(variable: PlacedVariable, length: int) -> int:
    return length * math.prod(variable.shape[1:]) * np.dtype(variable.dtype).itemsize
