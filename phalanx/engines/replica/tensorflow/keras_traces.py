"""Which of its traces Keras's own step function would use for a batch, and what that was made with.

A trace has the optimizer's plain numbers, its learning-rate schedule and which weights are trained as they were when it
was made. Keras traces for what it knows of its data before it reads them; a replica's part of a batch has another size
than the batch, so the traces of its own step say nothing about Keras's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from phalanx.arrays.tree import map_leaves
from phalanx.engines.batch_packing import BatchPacking
from phalanx.engines.engine import Batch, Merge
from phalanx.engines.replica.hyperparameters import Hyperparameters
from phalanx.engines.replica.tensorflow.batch_functions import BatchFunction, batch_kind, runs_eagerly
from phalanx.keras_compat import model_state
from phalanx.keras_compat.trainable_flags import TrainableFlags


class TraceConditions:
    """What a trace of a model's step is made with, as it is now.

    Attributes:
        key: equal for equal conditions.
    """

    def __init__(self, model: Any) -> None:
        self._hyperparameters = Hyperparameters(model_state.optimizers(model))
        self._flags = TrainableFlags(model)
        self.key = self._hyperparameters.key, self._flags.key

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, model and optimizers are as they were."""
        with self._hyperparameters.in_place(), self._flags.in_place():
            yield


class KerasTraces:
    """The traces of one model's step function.

    Args:
        model: compiled.
        batches: knows the structure in which Keras has its batches.
        merge: knows the size of every global batch, where Keras does in advance.

    Attributes:
        model: see above.
    """

    def __init__(self, model: Any, batches: BatchPacking, merge: Merge) -> None:
        self.model = model
        self._batches = batches
        self._merge = merge
        # TensorFlow's own rules decide (`reduce_retracing`, as Keras has it), of a function that does nothing.
        self._function = tf.function(lambda data: tf.constant(0), reduce_retracing=True)
        self._function._omit_frequent_tracing_warning = True
        # By trace. It holds the traces, too: without it, another one could get the identity of one that is gone.
        self._made_with: dict[Any, TraceConditions] = {}
        self._newest: tuple[Any, tuple[Hashable, TraceConditions]] | None = None

    def find(self, data: Batch) -> tuple[Hashable, TraceConditions]:
        """What tells a function for this local batch from others, and what that is made with."""
        form, fixed_size = self._batches.form, self._merge.fixed_size
        kind = batch_kind(data), form, fixed_size
        if self._newest is None or self._newest[0] != kind:
            conditions = self._of_batch(data, fixed_size)
            self._newest = kind, ((form, conditions.key), conditions)
        return self._newest[1]

    def _of_batch(self, data: Batch, fixed_size: int | None) -> TraceConditions:
        def spec(array: Any) -> Any:
            return tf.TensorSpec([fixed_size, *array.shape[1:]], tf.as_dtype(array.dtype))

        trace = self._function.get_concrete_function(self._batches.pack(map_leaves(spec, data)))
        return self._made_with.setdefault(trace, TraceConditions(self.model))


class TrainingFunctions:
    """A training step, traced under the conditions that Keras's would have for a batch.

    Args:
        traces: of Keras.
        step: a function of batches.
        make: makes a traced function of one.
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
            function = self._made[key] = self._make(self._under(conditions))
        return function(data)

    def _under(self, conditions: TraceConditions) -> Callable[[Batch], Any]:
        def step(data: Batch) -> Any:  # runs while it is traced
            with conditions.in_place():
                return self._step(data)

        return step
