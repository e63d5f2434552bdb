"""The optimizer of a server with embedding tables, which it updates by rows.

The tables, and the optimizer's state for each of their rows, are arrays in this process's memory. An update gathers the
rows that it touches into a small variable, applies the optimizer to it and to the shards that are not tables in one
step, and writes the rows back. So the work does not grow with the height of a table.

Rows that an update does not touch keep their values and their optimizer state: moments and weights do not decay.
`LazyAdam` of TensorFlow Addons and `torch.optim.SparseAdam` do the same. For optimizers without state (SGD), or whose
state is a sum of gradients (Adagrad), the result equals that of updating all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from phalanx.engines import make_updater
from phalanx.engines.updater import Updater, UpdaterPiece
from phalanx.keras_compat.variables.optimizer_slots import OptimizerSlot
from phalanx.parameter_server.table_rows import TableRows, next_power_of_two, padded

Array = np.ndarray[Any, Any]

MIN_CAPACITY = 64
"""Minimum number of rows that the optimizer's variable of a table holds."""


class EmbeddingTableUpdater:
    """An optimizer, its pieces, and the tables among these. Used by one thread at a time, like an `Updater`.

    Args:
        optimizer: The optimizer's Keras config, as JSON.
        pieces: The shards of this server.
        tables: Numbers of the pieces that are tables.

    Attributes:
        slots: Piece and name of each of the optimizer's variables.
        groups: Numbers of the pieces in each group; see `Updater`. The tables come last.
        shares_buffers: Whether `values` returns shared memory; see `Updater`.
    """

    def __init__(self, optimizer: str, pieces: Sequence[UpdaterPiece], tables: Collection[int]):
        self._optimizer = optimizer
        self._pieces = tuple(pieces)
        self._tables = {number: _writable(pieces[number].value) for number in sorted(tables)}
        self._dense = [number for number in range(len(pieces)) if number not in self._tables]
        # Rows of each table that the optimizer's variable holds. Only grows, in powers of two: each compiles once.
        self._capacity = {number: min(MIN_CAPACITY, len(table)) for number, table in self._tables.items()}
        self._updater = self._build_updater([pieces[number].value for number in self._dense])
        of_tables = tuple((number,) for number in self._tables)
        self._dense_groups = tuple(group for group in self._updater.groups if group not in of_tables)
        self.groups = self._dense_groups + of_tables
        self.shares_buffers = self._updater.shares_buffers
        self.slots: tuple[OptimizerSlot, ...] = self._updater.slots
        # Values of each of the optimizer's table variables for all rows, by the variable's index, in the table's shape.
        self._state = {
            place: np.broadcast_to(value[:1], self._tables[slot.variable].shape)  # until it is loaded
            for place, (slot, value) in enumerate(zip(self.slots, self._updater.optimizer_values(), strict=True))
            if slot.variable in self._tables
        }

    def apply(self, gradients: Sequence[Array | TableRows]) -> None:
        """Apply one update, given the gradients of the groups; for tables, these are `TableRows`."""
        by_group = dict(zip(self.groups, gradients, strict=True))
        rows = {number: by_group[number,] for number in self._tables}
        numbers = {number: part.numbers for number, part in rows.items() if isinstance(part, TableRows)}
        self._ensure_capacity({number: len(touched) for number, touched in numbers.items()})
        table_of = {place: self.slots[place].variable for place in self._state}
        # Rows up to `_capacity` are padding: zeros with gradients of zero. Their results are dropped below.
        self._updater.load(
            {n: padded(table[numbers[n]], self._capacity[n]) for n, table in self._tables.items()},
            {place: padded(self._state[place][numbers[n]], self._capacity[n]) for place, n in table_of.items()},
        )
        self._updater.apply(
            [
                padded(gradient.values, self._capacity[group[0]]) if isinstance(gradient, TableRows) else gradient
                for group, gradient in ((group, by_group[group]) for group in self._updater.groups)
            ]
        )
        values, state = self._updater.fetch(list(self._tables), list(table_of))
        for (number, table), value in zip(self._tables.items(), values, strict=True):
            table[numbers[number]] = value[: len(numbers[number])]
        for (place, number), value in zip(table_of.items(), state, strict=True):
            self._state[place][numbers[number]] = value[: len(numbers[number])]

    def values(self) -> list[Array]:
        """The current values of the groups, except tables; see `shares_buffers`."""
        present = dict(zip(self._updater.groups, self._updater.values(), strict=True))
        return [present[group] for group in self._dense_groups]

    def tables(self) -> list[Array]:
        """The tables themselves, which change with every update."""
        return list(self._tables.values())

    def optimizer_values(self) -> list[Array]:
        """Copies of the optimizer's variables, in the order of `slots`; variables of tables have all rows."""
        return [
            self._state[place].copy() if place in self._state else value
            for place, value in enumerate(self._updater.optimizer_values())
        ]

    def without_tables(self) -> tuple[tuple[OptimizerSlot, ...], list[Array]]:
        """The slots and values of the optimizer's variables that belong to no table."""
        places = [place for place in range(len(self.slots)) if place not in self._state]
        _, values = self._updater.fetch((), places)
        return tuple(self.slots[place] for place in places), [np.array(value) for value in values]

    def load_optimizer(self, values: Sequence[Array]) -> None:
        """Assign values to the optimizer's variables, in the order of `slots`."""
        for place in self._state:
            self._state[place] = _writable(values[place])
        self._updater.load({}, {place: value for place, value in enumerate(values) if place not in self._state})

    def count(self, updates: int) -> None:
        """Add these updates to the optimizer's step counter."""
        self._updater.count(updates)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate; a learning-rate schedule is kept."""
        self._updater.set_learning_rate(rate)

    def _ensure_capacity(self, rows: dict[int, int]) -> None:
        capacity = {
            number: max(self._capacity[number], min(next_power_of_two(count), len(self._tables[number])))
            for number, count in rows.items()
        }
        if capacity == self._capacity:
            return
        kept = [place for place in range(len(self.slots)) if place not in self._state]
        dense, state = self._updater.fetch(self._dense, kept)
        self._capacity = capacity
        self._updater = self._build_updater(dense)
        self._updater.load({}, dict(zip(kept, state, strict=True)))

    def _build_updater(self, dense: Sequence[Array]) -> Updater:
        """Build an optimizer for the pieces, with `_capacity` rows of each table."""
        values = dict(zip(self._dense, dense, strict=True)) | {
            number: np.zeros((self._capacity[number], *table.shape[1:]), table.dtype)
            for number, table in self._tables.items()
        }
        pieces = [piece._replace(value=values[number]) for number, piece in enumerate(self._pieces)]
        return make_updater(self._optimizer, pieces, ungrouped=self._tables)


def _writable(array: Array) -> Array:
    """The array, or a writable copy of it."""
    return np.require(array, requirements=("C", "A", "W"))
