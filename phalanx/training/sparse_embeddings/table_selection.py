"""Selection of the embeddings that can be trained by rows, and that are worth it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import tree

from phalanx.engines.updater import row_update_obstacle
from phalanx.keras_compat.keras_internals import Functional
from phalanx.keras_compat.variables.optimizer_slots import OptimizerSlot
from phalanx.parameter_server.table_rows import ROW_NUMBER_DTYPE

logger = logging.getLogger(__name__)

MIN_ROWS_PER_LOOKUP = 16
"""Minimum ratio of table rows to rows that a batch looks up. Below it, all rows are sent unless the user decides
otherwise: finding the rows costs about as much as handling a few times as many."""
MIN_TABLE_BYTES = 1 << 20
"""A smaller table is sent with all rows, unless the user decides otherwise."""
LARGE_TABLE_BYTES = 16 << 20
"""Size from which a table that is sent with all rows is logged."""
MAX_ROWS = np.iinfo(ROW_NUMBER_DTYPE).max
"""Greater than any row number."""


@dataclass(frozen=True, eq=False)
class EmbeddingTable:
    """An embedding of a model.

    Attributes:
        layer: A `keras.layers.Embedding`.
        variable: Its table, with all rows.
        number: Index of the variable among the model's trainable ones.
        inputs: Input tensors of the layer, one for each call in the model's graph.
        problem: Reason why the table cannot be trained by rows; "" if it can.
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
    """Return the tables of all embeddings that the model trains.

    Args:
        model: A built Keras model.
        slots: Slots to which the variables of its optimizer belong.
    """
    # By identity: a table that is not currently trainable is not among them.
    numbers = {id(variable): number for number, variable in enumerate(model.trainable_variables)}
    graph, problem_of_model = layer_graph(model)
    tables = []
    for layer in model._flatten_layers():
        # Bypasses the property `embeddings`, which computes for a quantized or LoRA-adapted layer.
        variable = vars(layer).get("_embeddings")
        if isinstance(layer, keras.layers.Embedding) and id(variable) in numbers:
            number = numbers[id(variable)]
            inputs = () if graph is None else _inputs_of(layer, graph)
            problem = (
                _problem_of_layer(layer, variable)
                or row_update_obstacle(model.optimizer, slots, number, variable.shape)
                or problem_of_model
                or _problem_of_graph(layer, variable, inputs, graph, model)
            )
            tables.append(EmbeddingTable(layer, variable, number, inputs, problem))
    return tables


def select_tables(
    tables: Iterable[EmbeddingTable], wanted: bool | str, uses: Callable[[Sequence[EmbeddingTable]], Sequence[int]]
) -> list[EmbeddingTable]:
    """Return the tables to train by rows.

    Args:
        tables: All tables of the model.
        wanted: True for all tables that support it; "auto" for those that are also worth it; False for none.
        uses: Counts the rows that the first batch looks up in each given table.
    """
    if wanted is False:
        return []
    able = []
    for table in tables:
        if not table.problem:
            able.append(table)
        elif wanted is True or table.bytes >= LARGE_TABLE_BYTES:
            logger.warning("All rows of the table %s are sent at every step, because %s.", table, table.problem)
    if wanted is True or not able:
        return able
    return [
        table
        for table, used in zip(able, uses(able), strict=True)
        if table.bytes >= MIN_TABLE_BYTES and table.variable.shape[0] >= MIN_ROWS_PER_LOOKUP * used
    ]


def layer_graph(model: Any) -> tuple[Any, str]:
    """Return the model's graph of layers; or None, and why it cannot be relied on."""
    kind = type(model)
    graph = model._functional if isinstance(model, keras.Sequential) else model
    if not isinstance(graph, Functional):
        return None, "the model is not made of layers in a graph (Functional or Sequential)"
    own = keras.Sequential if isinstance(model, keras.Sequential) else Functional
    for method, base in (("call", own), ("train_step", keras.Model)):
        if getattr(kind, method) is not getattr(base, method):
            return None, f"the model's class overrides `{method}`, which may look up other numbers"
    return graph, ""


def _nodes(graph: Any) -> list[Any]:
    return [node for nodes in graph._nodes_by_depth.values() for node in nodes]


def _inputs_of(layer: Any, graph: Any) -> tuple[Any, ...]:
    """Return the tensors with which a layer is called in a graph."""
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
    if variable.shape[0] > MAX_ROWS:
        return f"it has more than {MAX_ROWS} rows"
    return ""


def _problem_of_graph(layer: Any, variable: Any, inputs: Sequence[Any], graph: Any, model: Any) -> str:
    if not inputs:
        return "its layer is inside another layer or model"
    # The layer itself, its graph and the model always hold the table.
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
    """Describe why a tensor cannot be computed before the step from the batch alone; "" if it can."""
    starts = {id(start) for start in graph.inputs}
    # Walk back through the graph: every operation on the way must be a function of the batch alone.
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
