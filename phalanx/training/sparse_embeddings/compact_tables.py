"""Small tables that replace the tables of embedding layers while a model trains by rows.

Before a step, the row numbers that a batch looks up are computed on the host, from the batch alone. The layer's table
is replaced by a small one with only these rows, in ascending order of their numbers, and the layer searches for each
number among them. So what a step computes, sends and receives does not grow with the height of the table.

The number of rows of a small table is a power of two, so that compiled functions keep their shapes. Unused rows are
never looked up, and their gradients are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import numpy as np

from phalanx.engines.engine import Engine
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.patching import override_methods, restore_methods, set_untracked
from phalanx.parameter_server.table_rows import ROW_NUMBER_DTYPE, next_power_of_two, padded
from phalanx.training.sparse_embeddings.row_lookup import RowLookup, unique_numbers
from phalanx.training.sparse_embeddings.table_selection import MAX_ROWS, EmbeddingTable

Array = np.ndarray[Any, Any]

CAPACITY_FACTOR = 1.25
"""Factor by which a table is larger than the first batch needs: whenever it becomes too small, steps are recompiled."""
NO_ROW = MAX_ROWS
"""Pads the numbers of the rows in use; greater than any row number, so that they stay sorted."""


class SparseEmbeddings:
    """Embeddings of a model that are trained by rows.

    Row numbers and rows are lists with one array per table.

    Args:
        model: A built Keras model.
        tables: Its tables to train by rows, all with an empty `problem`.
    """

    def __init__(self, model: Any, tables: Sequence[EmbeddingTable]):
        self.tables = tuple(tables)
        self._lookup = RowLookup(model, tables)
        self._compact: list[CompactTable] = []
        # Whether the layers have the small tables now: only in steps, so that other readers of the model find whole
        # ones.
        self._is_installed = False

    def serves(self, tables: Sequence[EmbeddingTable]) -> bool:
        """Whether this object is for these tables, of the same graph."""
        return [_identity(table) for table in tables] == [_identity(table) for table in self.tables]

    def count(self, data: Any) -> list[int]:
        """Return how many numbers a batch looks up in each table, repetitions included."""
        return [sum(part.size for part in parts) for parts in self._lookup(data[0])]

    def numbers(self, data: Any) -> list[Array]:
        """Return the distinct numbers that a batch looks up in each table, ascending.

        Raises: ConfigurationError if one is not in the table.
        """
        return [unique_numbers(table, parts) for table, parts in zip(self.tables, self._lookup(data[0]), strict=True)]

    def load(self, engine: Engine, numbers: Sequence[Array], rows: Sequence[Array]) -> None:
        """Prepare the model for a step that looks up these numbers, whose rows are given."""
        fits = self._compact and all(
            len(n) <= compact.capacity for n, compact in zip(numbers, self._compact, strict=True)
        )
        if not fits or not self._is_installed:
            engine.end()
            if not fits:
                self.restore_tables()
                # They only grow: a size that was needed once will be needed again, and any other is compiled again.
                capacities = [compact.capacity for compact in self._compact] or [0] * len(self.tables)
                self._compact = [
                    CompactTable(table, max(capacity, _capacity_for(table, len(n))))
                    for table, capacity, n in zip(self.tables, capacities, numbers, strict=True)
                ]
                engine.retrace()
            for compact in self._compact:
                compact.install()
            self._is_installed = True
            engine.begin()
        engine.write([pair for c, n, r in zip(self._compact, numbers, rows, strict=True) for pair in c.values(n, r)])

    def restore_tables(self) -> None:
        """Restore the model's tables, with their previous values; after `engine.end()`. Safe to call twice."""
        if self._is_installed:
            self._is_installed = False
            for compact in self._compact:
                compact.uninstall()

    def assign(self, tables: Sequence[Array]) -> None:
        """Assign values to the tables, all rows."""
        for table, values in zip(self.tables, tables, strict=True):
            table.variable.assign(values)


class CompactTable:
    """A small table that replaces a layer's table.

    Args:
        table: The table to replace.
        capacity: Number of rows.
    """

    def __init__(self, table: EmbeddingTable, capacity: int):
        self.capacity = capacity
        self._table = table
        variable = table.variable
        dtype = str(variable.dtype)
        self._rows = keras.Variable(
            np.zeros((capacity, *variable.shape[1:]), dtype), dtype=dtype, trainable=True, name=variable.name
        )
        # Messages, and code that selects variables by path, must see the table's path.
        self._rows._path = variable.path
        self._numbers = keras.Variable(
            np.full(capacity, NO_ROW), dtype=ROW_NUMBER_DTYPE.name, trainable=False, name="row_numbers"
        )

    def install(self) -> None:
        layer = self._table.layer
        _swap_variables(layer, [self._table.variable], [self._rows, self._numbers])
        set_untracked(layer, _embeddings=_TablePlaceholder(str(self._table)))
        override_methods(layer, call=self._call, save_own_variables=_refuse_to_save)

    def uninstall(self) -> None:
        layer = self._table.layer
        restore_methods(layer, "call", "save_own_variables")
        set_untracked(layer, _embeddings=self._table.variable)
        _swap_variables(layer, [self._rows, self._numbers], [self._table.variable])

    def values(self, numbers: Array, rows: Array) -> list[tuple[Any, Array]]:
        """Return the variables, with their values for a step."""
        places = np.full(self.capacity, NO_ROW, ROW_NUMBER_DTYPE)
        # Ascending, then NO_ROW: `_call` searches by bisection.
        places[: len(numbers)] = numbers
        return [(self._numbers, places), (self._rows, padded(rows, self.capacity))]

    def _call(self, inputs: Any) -> Any:
        """Replacement for `Embedding.call`. A number that is not among the rows, which must not happen, gives NaN."""
        ops = keras.ops
        layer, height = self._table.layer, self._table.variable.shape[0]
        if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
            inputs = ops.cast(inputs, "int32")
        wanted = ops.reshape(inputs, (-1,))
        wanted = ops.where(wanted < 0, wanted + height, wanted)  # counted from the end, as in Keras
        numbers = ops.cast(self._numbers, wanted.dtype)
        places = ops.minimum(ops.searchsorted(numbers, wanted), self.capacity - 1)
        found = ops.expand_dims(ops.equal(ops.take(numbers, places, axis=0), wanted), -1)
        rows = ops.where(found, ops.take(self._rows, places, axis=0), float("nan"))
        return ops.cast(ops.reshape(rows, (*ops.shape(inputs), layer.output_dim)), layer.compute_dtype)


class _TablePlaceholder:
    """Placeholder for the table of a layer while it is trained by rows; any use raises."""

    def __init__(self, table: str):
        self._table = table

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            f"The table {self._table} is not in this process while `fit` trains single rows of it. Something uses it "
            f"in another way than by calling its layer with numbers from the batch, or between two batches: pass "
            f"embedding_rows=False to ParameterServerStrategy."
        )

    __getattr__ = __getitem__ = __array__ = __len__ = __iter__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __rmatmul__ = _refuse


def _refuse_to_save(*_: Any) -> NoReturn:
    raise UnsupportedError(
        "A model cannot be saved between two batches while `fit` trains single rows of its embeddings. Save it at the "
        "end of epochs, or pass embedding_rows=False to ParameterServerStrategy."
    )


def _identity(table: EmbeddingTable) -> list[int]:
    return [id(table.layer), id(table.variable), *map(id, table.inputs)]


def _swap_variables(layer: Any, out: Sequence[Any], into: Sequence[Any]) -> None:
    """Replace variables of a layer."""
    # A built layer's tracker refuses other variables.
    was_locked = layer._tracker.locked
    for variable in out:
        layer._untrack_variable(variable)
    layer._tracker.unlock()
    for variable in into:
        layer._track_variable(variable)
    if was_locked:
        layer._tracker.lock()


def _capacity_for(table: EmbeddingTable, used: int) -> int:
    return min(next_power_of_two(int(used * CAPACITY_FACTOR)), int(table.variable.shape[0]))
