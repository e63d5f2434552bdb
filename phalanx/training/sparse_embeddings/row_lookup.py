"""Row numbers that a batch looks up, computed on the host from the model's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from phalanx.errors import ConfigurationError
from phalanx.parameter_server.table_rows import ROW_NUMBER_DTYPE
from phalanx.training.sparse_embeddings.table_selection import EmbeddingTable, layer_graph

Array = np.ndarray[Any, Any]


class RowLookup:
    """Computation of the numbers with which embedding layers are called.

    Args:
        model: A built Keras model.
        tables: Tables of embeddings in its graph of layers.
    """

    def __init__(self, model: Any, tables: Sequence[EmbeddingTable]):
        graph, _ = layer_graph(model)
        assert graph is not None, "the tables were found in it"
        self._graph = graph
        places = {id(tensor): place for place, tensor in enumerate(graph.inputs)}
        wanted = [tensor for table in tables for tensor in table.inputs]
        self._counts = [len(table.inputs) for table in tables]
        # If every table is looked up directly with an input of the model, the batch has the numbers and nothing is
        # computed.
        self._direct = [places[id(tensor)] for tensor in wanted] if all(id(t) in places for t in wanted) else None
        self._function = (
            None if self._direct is not None else keras.Function(graph.inputs, wanted, name="numbers_of_rows")
        )

    def __call__(self, x: Any) -> list[list[Array]]:
        """Return for each table the flat numbers of each call of its layer."""
        if self._direct is not None:
            given = self._inputs(x)
            found = [_cast(given[place], self._graph.inputs[place].dtype) for place in self._direct]
        else:
            assert self._function is not None
            found = [
                keras.ops.convert_to_numpy(value)
                for value in tree.flatten(self._function(self._graph._standardize_inputs(x)))
            ]
        flat = iter(np.ravel(_cast(value, "int64")) for value in found)
        return [[next(flat) for _ in range(count)] for count in self._counts]

    def _inputs(self, x: Any) -> Sequence[Any]:
        """Return the values of the model's inputs in order; on the host, if their assignment is evident."""
        struct, names = self._graph._inputs_struct, [tensor.name for tensor in self._graph.inputs]
        if isinstance(x, dict):
            if isinstance(struct, dict) and set(struct) == set(x):
                return list(tree.flatten(x))
            if not isinstance(struct, dict) and set(names) <= set(x):
                return [x[name] for name in names]
        elif isinstance(x, list | tuple):
            if isinstance(struct, list | tuple) and len(x) == len(names):
                return list(tree.flatten(list(x)))
        elif len(names) == 1:
            return [x]
        return [keras.ops.convert_to_numpy(value) for value in self._graph._standardize_inputs(x)]


def _cast(value: Any, dtype: str) -> Array:
    return np.asarray(value).astype(dtype, copy=False)


def unique_numbers(table: EmbeddingTable, parts: Sequence[Array]) -> Array:
    """Return the distinct row numbers in some arrays, ascending; negative ones count from the end.

    Raises: ConfigurationError if one is not in the table.
    """
    height = table.variable.shape[0]
    numbers = np.unique(np.concatenate([np.zeros(0, ROW_NUMBER_DTYPE), *parts]))
    if len(numbers) and numbers[0] < 0:
        numbers = np.unique(np.where(numbers < 0, numbers + height, numbers))
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < height:
        # `height` was added to negative ones above: the message shows what the batch holds.
        wrong = numbers[-1] if numbers[-1] >= height else numbers[0] - height
        raise ConfigurationError(
            f"The input of the layer `{table.layer.name}` holds the number {wrong}; its table has {height} rows "
            f"(input_dim), so numbers must be from 0 to {height - 1}."
        )
    return numbers.astype(ROW_NUMBER_DTYPE)
