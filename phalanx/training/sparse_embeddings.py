"""Embedding layers of which only the rows that a batch uses are in this process while it trains.

Before a step the numbers that a batch looks up are computed on the host, from the batch alone. In the place of a
layer's table stands a small one with just these rows, in ascending order of their numbers, and the layer looks for the
place of each number among them. So what a step computes, and what it sends and fetches, does not grow with the height
of the table.

The small tables have room for a power of two of rows, so that compiled functions keep their shapes; what is left over
is never looked at, and its gradients are zero.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import numpy as np
from keras import tree

from phalanx.engines.engine import Engine
from phalanx.engines.updater import why_not_by_rows
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.keras_compat.internals import Functional
from phalanx.keras_compat.optimizer_slots import OptimizerSlot
from phalanx.keras_compat.patching import override_methods, restore_methods, set_untracked
from phalanx.parameter_server.table_rows import NUMBER, padded, power_of_two

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

WORTH_ROWS = 16
"""How many times as many rows as a batch looks up a table must have to travel by rows, unless it is told to: to find
the rows costs about as much as to handle a few times as many."""
WORTH_BYTES = 1 << 20
"""How large a table must be to travel by rows, unless it is told to."""
LARGE_BYTES = 16 << 20
"""A table that is as large and travels whole all the same is worth a line in the log."""
ROOM = 1.25
"""How much more room than the first batch needs there is for rows: each time it gets too small, steps are compiled."""
NOWHERE = np.iinfo(NUMBER).max
"""Stands after the numbers of the rows in use; greater than any, so that they are in order."""


@dataclass(frozen=True, eq=False)
class EmbeddingTable:
    """An embedding of a model.

    Attributes:
        layer: a `keras.layers.Embedding`.
        variable: its table, whole.
        number: of the variable among the model's trainable ones.
        inputs: what the layer is called with, one for each call in the model's graph.
        problem: why single rows of it cannot travel; "" if they can.
    """

    layer: Any
    variable: Any
    number: int
    inputs: tuple[Any, ...]
    problem: str

    def __str__(self) -> str:
        return f"`{self.variable.path}` {list(self.variable.shape)}"

    @property
    def bytes(self) -> int:
        return int(math.prod(self.variable.shape) * np.dtype(self.variable.dtype).itemsize)


def find_tables(model: Any, slots: Sequence[OptimizerSlot]) -> list[EmbeddingTable]:
    """The tables of all embeddings that the model trains; `slots` are of its optimizer."""
    numbers = {id(variable): number for number, variable in enumerate(model.trainable_variables)}
    graph, problem_of_model = _graph(model)
    tables = []
    for layer in model._flatten_layers():
        variable = vars(layer).get("_embeddings")
        if isinstance(layer, keras.layers.Embedding) and id(variable) in numbers:
            number = numbers[id(variable)]
            inputs = () if graph is None else _inputs_of(layer, graph)
            problem = (
                _problem_of_layer(layer, variable)
                or why_not_by_rows(model.optimizer, slots, number, variable.shape)
                or problem_of_model
                or _problem_of_graph(layer, variable, inputs, graph, model)
            )
            tables.append(EmbeddingTable(layer, variable, number, inputs, problem))
    return tables


def choose(
    tables: Iterable[EmbeddingTable], wanted: bool | str, uses: Callable[[Sequence[EmbeddingTable]], Sequence[int]]
) -> list[EmbeddingTable]:
    """The tables of which single rows are to travel.

    Args:
        wanted: True: all that can; "auto": those that can and are worth it; False: none.
        uses: how many numbers the first batch looks up in each of these tables.
    """
    if wanted is False:
        return []
    able = []
    for table in tables:
        if not table.problem:
            able.append(table)
        elif wanted is True or table.bytes >= LARGE_BYTES:
            logger.warning("All rows of the table %s travel at every step, because %s.", table, table.problem)
    if wanted is True or not able:
        return able
    return [
        table
        for table, used in zip(able, uses(able), strict=True)
        if table.bytes >= WORTH_BYTES and table.variable.shape[0] >= WORTH_ROWS * used
    ]


class SparseEmbeddings:
    """Some embeddings of a model, which it can train by rows.

    Row numbers and rows are lists with an array for each table.
    """

    def __init__(self, model: Any, tables: Sequence[EmbeddingTable]):
        self.tables = tuple(tables)
        self._numbers = _Numbers(model, tables)
        self._compact: list[_Compact] = []
        self._in_place = False

    def serves(self, tables: Sequence[EmbeddingTable]) -> bool:
        """Whether this is for these tables, of the same graph."""
        return [_identity(table) for table in tables] == [_identity(table) for table in self.tables]

    def count(self, data: Any) -> list[int]:
        """How many numbers a batch looks up in each table, each as often as it does."""
        return [sum(part.size for part in parts) for parts in self._numbers(data[0])]

    def numbers(self, data: Any) -> list[Array]:
        """The numbers that a batch looks up in each table, ascending, each once.

        Raises: ConfigurationError if one is not in the table.
        """
        return [_unique(table, parts) for table, parts in zip(self.tables, self._numbers(data[0]), strict=True)]

    def load(self, engine: Engine, numbers: Sequence[Array], rows: Sequence[Array]) -> None:
        """Make the model ready for a step that looks up these numbers, of which these are the rows."""
        fits = self._compact and all(len(n) <= compact.room for n, compact in zip(numbers, self._compact, strict=True))
        if not fits or not self._in_place:
            engine.end()
            if not fits:
                self.leave()
                rooms = [compact.room for compact in self._compact] or [0] * len(self.tables)
                self._compact = [
                    _Compact(table, max(room, _room(table, len(n))))
                    for table, room, n in zip(self.tables, rooms, numbers, strict=True)
                ]
                engine.retrace()
            for compact in self._compact:
                compact.enter()
            self._in_place = True
            engine.begin()
        engine.write([pair for c, n, r in zip(self._compact, numbers, rows, strict=True) for pair in c.values(n, r)])

    def leave(self) -> None:
        """Give the model its whole tables back, with the values that they had; after `engine.end()`. Safe to call
        twice."""
        if self._in_place:
            self._in_place = False
            for compact in self._compact:
                compact.leave()

    def assign(self, tables: Sequence[Array]) -> None:
        """Give the whole tables these values."""
        for table, values in zip(self.tables, tables, strict=True):
            table.variable.assign(values)


class _Compact:
    """A small table in the place of a layer's whole one."""

    def __init__(self, table: EmbeddingTable, room: int):
        self.room = room
        self._table = table
        variable = table.variable
        dtype = str(variable.dtype)
        self._rows = keras.Variable(
            np.zeros((room, *variable.shape[1:]), dtype), dtype=dtype, trainable=True, name=variable.name
        )
        self._rows._path = variable.path
        self._numbers = keras.Variable(np.full(room, NOWHERE), dtype=NUMBER.name, trainable=False, name="row_numbers")

    def enter(self) -> None:
        layer = self._table.layer
        _exchange(layer, [self._table.variable], [self._rows, self._numbers])
        set_untracked(layer, _embeddings=_Absent(str(self._table)))
        override_methods(layer, call=self._call, save_own_variables=_refuse_to_save)

    def leave(self) -> None:
        layer = self._table.layer
        restore_methods(layer, "call", "save_own_variables")
        set_untracked(layer, _embeddings=self._table.variable)
        _exchange(layer, [self._rows, self._numbers], [self._table.variable])

    def values(self, numbers: Array, rows: Array) -> list[tuple[Any, Array]]:
        """What the variables are to hold for a step."""
        places = np.full(self.room, NOWHERE, NUMBER)
        places[: len(numbers)] = numbers
        return [(self._numbers, places), (self._rows, padded(rows, self.room))]

    def _call(self, inputs: Any) -> Any:
        """In the place of `Embedding.call`. A number that is not among the rows, which cannot be, gives NaN."""
        ops = keras.ops
        layer, height = self._table.layer, self._table.variable.shape[0]
        if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
            inputs = ops.cast(inputs, "int32")
        wanted = ops.reshape(inputs, (-1,))
        wanted = ops.where(wanted < 0, wanted + height, wanted)  # counted from the end, as Keras does
        numbers = ops.cast(self._numbers, wanted.dtype)
        places = ops.minimum(ops.searchsorted(numbers, wanted), self.room - 1)
        found = ops.expand_dims(ops.equal(ops.take(numbers, places, axis=0), wanted), -1)
        rows = ops.where(found, ops.take(self._rows, places, axis=0), float("nan"))
        return ops.cast(ops.reshape(rows, (*ops.shape(inputs), layer.output_dim)), layer.compute_dtype)


class _Absent:
    """Stands where a layer keeps its table, while single rows of it travel."""

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


def _exchange(layer: Any, out: Sequence[Any], into: Sequence[Any]) -> None:
    """Let a layer have other variables."""
    locked = layer._tracker.locked
    for variable in out:
        layer._untrack_variable(variable)
    layer._tracker.unlock()
    for variable in into:
        layer._track_variable(variable)
    if locked:
        layer._tracker.lock()


def _room(table: EmbeddingTable, used: int) -> int:
    return min(power_of_two(int(used * ROOM)), int(table.variable.shape[0]))


def _unique(table: EmbeddingTable, parts: Sequence[Array]) -> Array:
    height = table.variable.shape[0]
    numbers = np.unique(np.concatenate([np.zeros(0, NUMBER), *parts]))
    if len(numbers) and numbers[0] < 0:
        numbers = np.unique(np.where(numbers < 0, numbers + height, numbers))
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < height:
        wrong = numbers[-1] if numbers[-1] >= height else numbers[0] - height
        raise ConfigurationError(
            f"The input of the layer `{table.layer.name}` holds the number {wrong}; its table has {height} rows "
            f"(input_dim), so numbers must be from 0 to {height - 1}."
        )
    return numbers.astype(NUMBER)


# What a batch looks up.


class _Numbers:
    """The numbers with which layers are called, from a model's inputs."""

    def __init__(self, model: Any, tables: Sequence[EmbeddingTable]):
        graph, _ = _graph(model)
        assert graph is not None, "the tables were found in it"
        self._graph = graph
        places = {id(tensor): place for place, tensor in enumerate(graph.inputs)}
        wanted = [tensor for table in tables for tensor in table.inputs]
        self._counts = [len(table.inputs) for table in tables]
        self._direct = [places[id(tensor)] for tensor in wanted] if all(id(t) in places for t in wanted) else None
        self._function = (
            None if self._direct is not None else keras.Function(graph.inputs, wanted, name="numbers_of_rows")
        )

    def __call__(self, x: Any) -> list[list[Array]]:
        """For each table the numbers of each call, flat."""
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
        """The values of the model's inputs in their order, on the host where that is as clear as it mostly is."""
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


# Where embeddings stand in a model.


def _graph(model: Any) -> tuple[Any, str]:
    """The model's graph of layers, or None and why it cannot be relied on."""
    kind = type(model)
    graph = model._functional if isinstance(model, keras.Sequential) else model
    if not isinstance(graph, Functional):
        return None, "the model is not made of layers in a graph (Functional or Sequential)"
    own = keras.Sequential if isinstance(model, keras.Sequential) else Functional
    for method, base in (("call", own), ("train_step", keras.Model)):
        if getattr(kind, method) is not getattr(base, method):
            return None, f"the model's class has a `{method}` of its own, which may look up other numbers"
    return graph, ""


def _nodes(graph: Any) -> list[Any]:
    return [node for nodes in graph._nodes_by_depth.values() for node in nodes]


def _inputs_of(layer: Any, graph: Any) -> tuple[Any, ...]:
    """What a layer is called with in a graph."""
    return tuple(tensor for node in _nodes(graph) if node.operation is layer for tensor in node.input_tensors)


def _problem_of_layer(layer: Any, variable: Any) -> str:
    if type(layer) is not keras.layers.Embedding:
        return f"{type(layer).__name__} may use its table in other ways than by looking up rows"
    if layer.lora_enabled or layer.quantization_mode is not None:
        return "the layer is quantized or adapted by LoRA"
    if variable.constraint is not None:
        return "it has a constraint, which may look at all rows"
    if variable.regularizer is not None:
        return "it has a regularizer, which looks at all rows"
    if variable.shape[0] > NOWHERE:
        return f"it has more than {NOWHERE} rows"
    return ""


def _problem_of_graph(layer: Any, variable: Any, inputs: Sequence[Any], graph: Any, model: Any) -> str:
    if not inputs:
        return "its layer is inside of another layer or model"
    for other in model._flatten_layers():
        others = () if any(other is part for part in (layer, graph, model)) else other.variables
        if any(own is variable for own in others):
            return f"the layer `{other.name}` uses it as well"
    for node in _nodes(graph):
        given = tree.flatten([node.arguments.args, node.arguments.kwargs])
        if any(value is variable for value in given):
            return "an operation of the model uses it as well"
    for tensor in inputs:
        if tensor.sparse:
            return "its layer takes sparse tensors"
        if problem := _problem_of_numbers(tensor, graph):
            return problem
    return ""


def _problem_of_numbers(tensor: Any, graph: Any) -> str:
    """Why a tensor cannot be computed before the step, from the batch alone."""
    starts = {id(start) for start in graph.inputs}
    ahead, seen = [tensor], set()
    while ahead:
        current = ahead.pop()
        if id(current) in starts or id(current) in seen:
            continue
        seen.add(id(current))
        operation, node, _ = current._keras_history
        if getattr(operation, "variables", None):
            return f"what it is looked up with depends on `{operation.name}`, which has weights or random numbers"
        ahead += operation._inbound_nodes[node].input_tensors
    return ""
