"""A server's shards of one declared model: their values, and the optimizer that updates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.arrays.allocation import copy_arrays
from phalanx.engines import make_updater
from phalanx.engines.updater import Updater, UpdaterPiece
from phalanx.parameter_server.server.embedding_tables import EmbeddingTableUpdater
from phalanx.parameter_server.server_messages import DeclareModel, Slots, arrays_of
from phalanx.parameter_server.shard_packing import ShardPacking, kind_of
from phalanx.parameter_server.shard_placement import shard_shape
from phalanx.parameter_server.table_rows import TableRows
from phalanx.transport.frames import byte_view

Array = np.ndarray[Any, Any]
Gradient = Array | TableRows
"""Gradient of a group of shards; for a table, of the rows that have one."""
CopyArrays = Callable[[list[Array]], list[Array]]
"""Copies arrays."""


class _GradientKind(NamedTuple):
    """Shape and dtype of the gradient of a group of shards; for a table, of one row."""

    is_table: bool
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class DeclaredShards:
    """A server's shards of one declared model. Protected by the store's lock.

    Args:
        index: Number of the server.
        declared: The chief's declaration of the model.
        slots: Names of the optimizer variables whose values are given.
        buffers: Values of the shards, then those of the optimizer variables.

    Attributes:
        groups: Numbers of the shards that are updated, and sent, as one vector.
        tables: The tables themselves, which change with every update.
    """

    def __init__(self, index: int, declared: DeclareModel, slots: Slots, buffers: Sequence[memoryview]):
        model = declared.model
        self.declared = declared
        self.shards = tuple(shard for shard in model.shards if shard.server == index)
        self.tables: list[Array] = []
        self.groups: tuple[tuple[int, ...], ...] = ()
        self._updater: Updater | EmbeddingTableUpdater | None = None  # None: this server has no shard of the model
        self._packing = ShardPacking((), ())  # of the dense groups
        self._kinds: list[_GradientKind] = []  # of the gradients of all groups, in the order in which they are sent
        if self.shards:  # otherwise this server has no part of this model
            self._build(slots, buffers)

    def _build(self, slots: Slots, buffers: Sequence[memoryview]) -> None:
        model = self.declared.model
        own = [model.variables[shard.variable] for shard in self.shards]
        values = arrays_of(buffers[: len(own)], [variable.dtype for variable in own])
        pieces = [
            UpdaterPiece(
                v.path,
                value.reshape(shard_shape(v, s)),
                model.constraints[s.variable],
                model.uses_weight_decay[s.variable],
            )
            for s, v, value in zip(self.shards, own, values, strict=True)
        ]
        tables = [number for number, shard in enumerate(self.shards) if shard.variable in model.tables]
        updater: Updater | EmbeddingTableUpdater
        if tables:
            updater = EmbeddingTableUpdater(model.optimizer, pieces, tables)
            self.tables = updater.tables()
        else:
            updater = make_updater(model.optimizer, pieces)
        self._updater = updater
        state = dict(zip(slots, buffers[len(pieces) :], strict=True))
        updater.load_optimizer(
            [_like(state[slot], value) for slot, value in zip(updater.slots, updater.optimizer_values(), strict=True)]
        )
        # Order of arrays in messages: dense groups, then tables (`ShardPacking`, `EmbeddingTableUpdater.groups`).
        kinds = [kind_of(piece.value) for piece in pieces]
        self.groups = updater.groups
        self._packing = ShardPacking(kinds, updater.groups, tables)
        self._kinds = [_GradientKind(False, *kind) for kind in self._packing.kinds]
        self._kinds += [_GradientKind(True, kinds[table][0][1:], kinds[table][1]) for table in tables]

    # Values.

    def values(self, copy: CopyArrays) -> list[Array]:
        """The current values of the groups, except tables, in memory that no update changes.

        The server keeps no reference to them, so an update may overwrite memory that is no longer referenced.
        """
        if self._updater is None:
            return []
        values = self._updater.values()
        return copy(values) if self._updater.shares_buffers else values

    def values_by_shard(self) -> list[Array]:
        """Copies of the shards' values, including tables, in the shards' order."""
        tables, values = iter(self.tables), iter(self._packing.unpack(self.values(copy_arrays)))
        is_table = [shard.variable in self.declared.model.tables for shard in self.shards]
        return [next(tables).copy() if table else next(values) for table in is_table]

    def optimizer_values(self, *, tables: bool = True) -> tuple[Slots, list[Array]]:
        """Names and values of the optimizer's variables; without `tables`, only of those that belong to no table."""
        if isinstance(self._updater, EmbeddingTableUpdater) and not tables:
            return self._updater.without_tables()
        return (self._updater.slots, self._updater.optimizer_values()) if self._updater else ((), [])

    def with_values(self, index: int, variables: Sequence[int], buffers: Sequence[memoryview]) -> DeclaredShards:
        """The same shards with new values of some variables; the optimizer keeps its state."""
        slots, optimizer = self.optimizer_values()
        new = iter(buffers)
        values = [
            next(new) if shard.variable in variables else byte_view(np.ascontiguousarray(value))
            for shard, value in zip(self.shards, self.values_by_shard(), strict=True)
        ]
        state = [byte_view(np.ascontiguousarray(each)) for each in optimizer]
        return DeclaredShards(index, self.declared, slots, [*values, *state])

    # Updates.

    def shape_gradients(self, flat: Iterator[Array]) -> list[Gradient]:
        """Shape flat arrays into a gradient for each group: one array each; for a table, row numbers and gradients."""
        gradients: list[Gradient] = []
        for is_table, shape, dtype in self._kinds:
            if is_table:
                numbers = next(flat)
                values = next(flat).astype(dtype, copy=False)
                gradients.append(TableRows(numbers, values.reshape(len(numbers), *shape)))
            else:
                gradients.append(next(flat).astype(dtype, copy=False).reshape(shape))
        return gradients

    def apply(self, gradients: Sequence[Gradient]) -> bool:
        """Apply one update. Returns whether there was anything to update."""
        if not gradients or self._updater is None:
            return False
        self._updater.apply(gradients)
        return True

    def set_learning_rate(self, rate: float) -> None:
        if self._updater is not None:
            self._updater.set_learning_rate(rate)

    def count_updates(self, updates: int) -> None:
        """Count these lost updates in the optimizer's step counter.

        Learning-rate schedules follow the steps of the job, which are the same on all servers.
        """
        if self._updater is not None and updates:
            self._updater.count(updates)


def gather_rows(tables: Sequence[Array], numbers: Sequence[Array]) -> list[Array]:
    """Copies of rows of each table, by their numbers."""
    return [table[wanted] for table, wanted in zip(tables, numbers, strict=True)]


def _like(buffer: memoryview, value: Array) -> Array:
    """A buffer's contents as an array like `value`.

    The integer size of a step counter depends on the sender's backend.
    """
    dtype = value.dtype
    sent = len(memoryview(buffer).cast("B")) // max(value.size, 1)
    if dtype.kind == "i" and sent != dtype.itemsize:
        return np.frombuffer(buffer, f"i{sent}").reshape(value.shape).astype(dtype)
    return np.frombuffer(buffer, dtype).reshape(value.shape)
