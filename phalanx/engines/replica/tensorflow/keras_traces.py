"""Finds the trace that Keras's step function would use for a batch, and the conditions under which it was created.

A trace contains the optimizer's plain numbers, its learning-rate schedule, which weights are trained, and the
attributes of custom layers at the time of tracing. Keras traces for what is known of the data before it is read. A
replica's part of a batch differs in size from the batch, so the traces of its own step say nothing about Keras's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from phalanx.arrays.tree import map_leaves
from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines.batch_packing import BatchPacking
from phalanx.engines.engine import Batch, Merge
from phalanx.engines.replica.hyperparameters import Hyperparameters
from phalanx.engines.replica.tensorflow.batch_functions import BatchFunction, batch_kind, runs_eagerly, spec_of_batch
from phalanx.keras_compat import model_state
from phalanx.keras_compat.variables.trainable_flags import TrainableFlags


class TraceConditions:
    """The settings with which a model's step would be traced now."""

    def __init__(self, model: Any) -> None:
        self._hyperparameters = Hyperparameters(model_state.optimizers(model))
        self._flags = TrainableFlags(model)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model and its optimizers have these settings."""
        with self._hyperparameters.applied(), self._flags.applied():
            yield


class KerasTraces:
    """The traces of one of a model's step functions.

    Args:
        model: A compiled model.
        batches: Structure in which Keras receives its batches.
        merge: Source of the size of every global batch, if Keras would know it in advance.
        structure: Structure of all batches; None: the one that `batches` expects.

    Attributes:
        model: The model.
    """

    def __init__(
        self, model: Any, batches: BatchPacking, merge: Merge, structure: ElementStructure | None = None
    ) -> None:
        self.model = model
        self._structure = structure
        self._batches = batches
        self._merge = merge
        # TensorFlow's own rules decide (`reduce_retracing`, as in Keras), on a function that does nothing.
        self._function = tf.function(lambda data: tf.constant(0), reduce_retracing=True)
        self._function._omit_frequent_tracing_warning = True
        # By trace. This also keeps the traces alive: otherwise, another trace could get the identity of a deleted one.
        self._conditions: dict[Any, TraceConditions] = {}
        self._newest: tuple[Any, tuple[Hashable, TraceConditions]] | None = None

    def find(self, data: Batch) -> tuple[Hashable, TraceConditions]:
        """Return Keras's trace for the global batch of this local one, and the conditions of that trace."""
        structure, fixed_size = self._structure or self._batches.structure, self._merge.fixed_size
        kind = batch_kind(data), structure, fixed_size
        if self._newest is None or self._newest[0] != kind:
            self._newest = kind, self._of_batch(data, structure, fixed_size)
        return self._newest[1]

    def _of_batch(
        self, data: Batch, structure: ElementStructure, fixed_size: int | None
    ) -> tuple[Hashable, TraceConditions]:
        specs = map_leaves(lambda array: spec_of_batch(array, fixed_size), data)
        trace = self._function.get_concrete_function(self._batches.pack(specs, structure))
        return (structure, trace), self._conditions.setdefault(trace, TraceConditions(self.model))


class FunctionsByTrace:
    """The functions of one step: one for each trace that Keras's step would have, traced under the same conditions.

    Args:
        traces: Keras's traces.
        step: A function of batches.
        make: Creates a `BatchFunction` from a function of batches.
    """

    def __init__(
        self, traces: KerasTraces, step: Callable[[Batch], Any], make: Callable[[Callable[[Batch], Any]], BatchFunction]
    ) -> None:
        self._traces = traces
        self._step = step
        self._make = make
        self._eager = make(step)
        self._made: dict[Hashable, BatchFunction] = {}

    def __call__(self, data: Batch) -> Any:
        if runs_eagerly(self._traces.model):
            return self._eager(data)
        key, conditions = self._traces.find(data)
        function = self._made.get(key)
        if function is None:
            function = self._made[key] = self._make(self._traced_under(conditions))
        return function(data)

    def _traced_under(self, conditions: TraceConditions) -> Callable[[Batch], Any]:
        def step(data: Batch) -> Any:  # runs during tracing
            with conditions.applied():
                return self._step(data)

        return step
