"""Keras models on JAX.

A training step is two compiled functions with the merge between them, because a host callback inside a compiled
function can deadlock in a process with one core (`step_functions`):

    gradients(state, batch)     -> gradients, layer state, metric increments, logs     (this rank's)
    merge                       -> the same over all ranks, in flat buffers
    update(state, flat buffers) -> weights, optimizer state, metric state, logs        (on every rank)

Ownership of the buffers: `update` of step k may still read them after it has returned (JAX works asynchronously and may
alias them), but the merge of step k + 1 waits for the gradients of step k + 1, which need the result of `update`
of step k. So no buffer is overwritten while it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import tree

from phalanx.arrays.tree import map_leaves
from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines.engine import Batch, Merge
from phalanx.engines.replica.hyperparameters import Hyperparameters
from phalanx.engines.replica.jax.compiled_step import CompiledStep
from phalanx.engines.replica.jax.local_step import LocalStep
from phalanx.engines.replica.jax.model_arguments import ModelArguments
from phalanx.engines.replica.jax.model_compiler import ModelCompiler
from phalanx.engines.replica.jax.output_packing import OutputPacking
from phalanx.engines.replica.jax.step_functions import AppliedResults, CompiledUpdate, StepFunctions, batch_kind
from phalanx.engines.replica.replica_engine import ReplicaEngine
from phalanx.keras_compat import model_state
from phalanx.keras_compat.global_batch.step_collectives import PREDICTION, StepScope

Array = np.ndarray[Any, Any]
Values = list[Any]


class _FirstHalf(NamedTuple):
    """The compiled functions for one kind of global batch, up to the merge."""

    functions: StepFunctions
    local: LocalStep


class JaxEngine(ReplicaEngine):
    """Steps of one Keras model on the JAX backend; see `phalanx.engines.engine.Engine`."""

    def __init__(self, model: Any, merge: Merge) -> None:
        self._arguments = ModelArguments(model)
        super().__init__(model, merge, self._arguments)
        self._logs: dict[str, Any] = {}  # of the newest training step
        self._packing: OutputPacking | None = None  # of the newest training step
        self._compiler = ModelCompiler(model)
        # By the kind of global batch (`batch_kind`): Keras traces its steps once for each kind, and keeps the settings
        # of that time. The same local batch may be part of several kinds.
        self._first_halves: dict[Hashable, _FirstHalf] = {}
        self._known_hyperparameters: dict[Hashable, Hyperparameters] = {}
        self._tests: dict[Hashable, CompiledStep] = {}
        self._predictions: dict[Hashable, Callable[..., Any]] = {}
        self._updates: dict[ElementStructure, CompiledUpdate] = {}  # by the structure that custom steps receive

    @property
    def runs_python(self) -> bool:
        return not self._compiler.compiles

    def retrace(self) -> None:
        self._first_halves.clear()
        self._updates.clear()
        self._tests.clear()

    def _first_half(self, data: Batch, variables: int) -> _FirstHalf:
        kind = batch_kind(data, self._batches.structure, self._merge.global_size, variables)
        found = self._first_halves.get(kind)
        if found is None:
            # The original hyperparameters, not the current ones: Keras keeps those it compiled for this batch size.
            known = self._known_hyperparameters.get(kind)
            if known is None:
                known = self._known_hyperparameters[kind] = Hyperparameters([self._model.optimizer])
            functions = self._functions(known)
            local = LocalStep(self._model, self._merge, functions, self._compiler)
            found = self._first_halves[kind] = _FirstHalf(functions, local)
        return found

    def _update(self) -> CompiledUpdate:
        found = self._updates.get(self._batches.structure)
        if found is None:
            found = self._updates[self._batches.structure] = CompiledUpdate(self._model)
        return found

    def _test(self, data: Batch, variables: int) -> CompiledStep:
        kind = batch_kind(data, self._batches.structure, self._merge.global_size, variables)
        found = self._tests.get(kind)
        if found is None:
            functions = self._functions(Hyperparameters([]))
            found = self._tests[kind] = CompiledStep(functions.test, self._compiler.jit, self._merge, donate=(2,))
        return found

    def _prediction(self, data: Batch, structure: ElementStructure, variables: int) -> Callable[..., Any]:
        kind = batch_kind(data, structure, self._merge.global_size, variables)
        found = self._predictions.get(kind)
        if found is None:
            found = self._predictions[kind] = self._compiler.jit(self._model.predict_step)
        return found

    def _functions(self, hyperparameters: Hyperparameters) -> StepFunctions:
        origins = self.origins, self._test_origins
        batches, rules = self._batches, self.metric_rules
        return StepFunctions(self._model, self._merge, self._compiler, batches, rules, origins, hyperparameters)

    def build(self, data: Batch) -> None:
        self._model._symbolic_build(data_batch=self._batches.for_keras(map_leaves(_in_jax_dtype, data)))
        self._set_variables()

    def train(self, data: Batch, share: float) -> None:
        trainable, non_trainable, optimizer, metrics = self._arguments.get(with_optimizer=True)
        arguments = (trainable, non_trainable, optimizer, metrics, data)
        functions, step = self._first_half(data, len(trainable) + len(optimizer))
        # Not kept before the update: if the merge raises, the model still has the state from before the step.
        local = step(share, *arguments)
        if isinstance(local, AppliedResults):
            trainable, optimizer = local.trainable, local.optimizer
        packing = self._packing = functions.find_packing(*arguments)
        # `np.asarray` waits for the gradients. On CPUs it is a view of JAX's memory, which the merge only reads.
        flats = self._merge(packing.packed_layout, [np.asarray(array) for array in local.merged], share)
        # Large arrays are sent to a device one by one, in parallel.
        merged = flats if self._compiler.pinned is None else packing.packed_layout.unpack(flats)
        update = self._update().choose(functions, packing, flats)
        # If servers make the update, the optimizer's variables do not change here, and are not passed.
        moved = [] if self._merge.updates_weights else optimizer
        trainable, updated, metrics, state, self._logs = update(trainable, moved, metrics, merged)
        optimizer = optimizer if self._merge.updates_weights else updated
        # The merged floating layer state, and what each rank keeps to itself (seeds).
        for index, value in [*zip(packing.state, state, strict=True), *local.private.items()]:
            non_trainable[index] = value
        self._arguments.keep(trainable, non_trainable, optimizer, metrics)

    def compile_ahead(self, data: Batch, share: float) -> Callable[[], None] | None:
        trainable, non_trainable, optimizer, metrics = self._arguments.get(with_optimizer=True)
        step = self._first_half(data, len(trainable) + len(optimizer)).local
        return step.compile_ahead(share, trainable, non_trainable, optimizer, metrics, data)

    def test(self, data: Batch, share: float) -> None:
        trainable, non_trainable, _, metrics = self._arguments.get(with_optimizer=False)
        start = metrics if share else [jnp.copy(value) for value in metrics]  # the function consumes its argument
        step = self._test(data, len(trainable))
        new_metrics, changed, self._test_logs = step(share, trainable, non_trainable, start, data)
        self._share = share
        if share:
            metrics = new_metrics
            for index, value in changed.items():
                non_trainable[index] = value
        self._arguments.keep(trainable, non_trainable, None, metrics)

    def logs(self) -> Mapping[str, Any]:
        return self._logs

    def _custom_logs(self) -> Mapping[str, Any]:
        flat, packing = model_state.flat_logs(self._logs), self._packing
        return {name: flat[name] for name in (() if packing is None else packing.logs)}

    def _metric_read_scope(self) -> AbstractContextManager[Any]:
        if self.variables_are_current:
            return nullcontext()
        *_, metrics = self._arguments.get(with_optimizer=False)
        scope: AbstractContextManager[Any] = keras.StatelessScope(
            list(zip(self._model.metrics_variables, metrics, strict=True))
        )
        return scope

    def predict(self, data: Batch, structure: ElementStructure = ElementStructure.PARTS, share: float = 1.0) -> Any:
        trainable, non_trainable, _, metrics = self._arguments.get(with_optimizer=False)
        step = self._prediction(data, structure, len(trainable))
        with StepScope(PREDICTION):
            outputs, non_trainable = step((trainable, non_trainable), self._batches.pack(data, structure))
        self._arguments.keep(trainable, list(non_trainable), None, metrics)
        return tree.map_structure(np.asarray, outputs)


def _in_jax_dtype(array: Array) -> Array:
    """Return the array in JAX's dtype for it. JAX would warn of the conversion even if only shapes are needed."""
    if array.dtype.kind not in "iufc":
        return array
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return array if dtype == array.dtype else np.broadcast_to(np.zeros((), dtype), array.shape)
