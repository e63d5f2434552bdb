"""The compiled steps of a model on a mesh: Keras's own steps, traced over global arrays.

To inspect a step without running it, for the mesh's devices or for others that need not exist:

    step = uncompiled_step(model, placement, (x, y, None), devices=topology.devices)
    compiled = step.function.lower(*step.arguments).compile()
    compiled.memory_analysis(), compiled.as_text()

`placement` is `strategy.placement` of the strategy in whose scope the model was compiled. x and y are arrays or
`jax.ShapeDtypeStruct`s of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.arrays.tree import map_leaves
from phalanx.engines.batch_packing import BatchPacking
from phalanx.engines.engine import Batch
from phalanx.engines.replica.jax.model_compiler import without_traces
from phalanx.engines.spmd.placed_model import PlacedModel, placement_scope
from phalanx.engines.spmd.placement import Axes, Placement
from phalanx.keras_compat.variables.variable_layouts import laying_out_gradients

Values = list[Any]


class UncompiledStep(NamedTuple):
    """A step that has not been compiled.

    Attributes:
        function: The result of `jax.jit`.
        arguments: `jax.ShapeDtypeStruct`s with shardings, in the structure of the function's arguments.
    """

    function: Any
    arguments: tuple[Any, ...]


class StepPrograms:
    """The functions of a model's steps, over arrays that span all devices of a mesh.

    Args:
        model: A compiled model, placed on the mesh.
        placed: The model's variables.
        placement: Placement on the devices that the functions are compiled for.
        batches: Structure in which steps receive their batches.
    """

    def __init__(self, model: Any, placed: PlacedModel, placement: Placement, batches: BatchPacking) -> None:
        self._model = model
        self._placed = placed
        self._placement = placement
        self._batches = batches
        self._mesh: Mesh = placement.mesh.backend_mesh

    def compile_train(self) -> Callable[..., Any]:
        """Return `(state, batch) -> logs, state`. A state has the values of the trainable, non-trainable, optimizer and
        metric variables. The function may overwrite it."""
        return self._jit(self._train, tuple(self._placed.shardings(self._mesh)))

    def compile_test(self) -> Callable[..., Any]:
        """Return the same for test steps, without the optimizer's variables; see `compile_train`."""
        trainable, non_trainable, _, metrics = self._placed.shardings(self._mesh)
        return self._jit(self._test, (trainable, non_trainable, metrics))

    def compile_predict(self) -> Callable[..., Any]:
        """Return `(state, batch) -> outputs, non-trainable values`. A state has trainable and non-trainable values."""
        shardings = self._placed.shardings(self._mesh)
        if not self._compiles:
            return self._predict
        # Other processes can only read what every device has.
        outputs = self._replicated if jax.process_count() > 1 else None
        compiled: Callable[..., Any] = jax.jit(
            without_traces(self._predict), out_shardings=(outputs, shardings.non_trainable), static_argnums=2
        )
        return compiled

    @property
    def _compiles(self) -> bool:
        return bool(self._model.jit_compile) and not self._model.run_eagerly

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec())

    def _jit(self, function: Callable[..., Any], state: tuple[Any, ...]) -> Callable[..., Any]:
        if not self._compiles:
            return function
        # The state leaves in the layout in which it arrived, so the next step is not compiled again and can reuse its
        # memory. Every process needs the logs.
        compiled: Callable[..., Any] = jax.jit(
            without_traces(function), donate_argnums=0, out_shardings=(self._replicated, state)
        )
        return compiled

    def _train(self, state: tuple[Values, ...], data: Batch) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        with placement_scope(self._placement), self._laying_out_gradients():
            # Sharded weights are gathered inside the program, so that XLA decides when it gathers each.
            gathered = self._gather_weights(trainable, non_trainable)
            logs, new = self._model.train_step((*gathered, optimizer, metrics), self._batches.pack(data))
        return logs, tuple(map(list, new))

    def _test(self, state: tuple[Values, ...], data: Batch) -> Any:
        trainable, non_trainable, metrics = state
        with placement_scope(self._placement):
            gathered = self._gather_weights(trainable, non_trainable)
            logs, new = self._model.test_step((*gathered, metrics), self._batches.pack(data))
        # The weights as they arrived, in shards: the step has seen whole ones.
        return logs, (trainable, list(new[1]), list(new[2]))

    def _predict(self, state: tuple[Values, ...], data: Batch, structure: Any) -> Any:
        with placement_scope(self._placement):
            outputs, new = self._model.predict_step(self._gather_weights(*state), self._batches.pack(data, structure))
        return outputs, list(new)

    def _laying_out_gradients(self) -> AbstractContextManager[None]:
        """Context in which gradients are divided before they are summed, at level 2 and above."""
        if self._placement.level < 2:
            return nullcontext()
        of_gradient = self._placement.gradient_layout
        return laying_out_gradients(lambda gradient, variable: self._constrain(gradient, of_gradient(variable)))

    def _gather_weights(self, trainable: Values, non_trainable: Values) -> tuple[Values, Values]:
        """Return the weights as the model computes with them."""
        if self._placement.level < 3:
            return trainable, non_trainable
        layouts = self._placed.step_layouts()
        return self._constrain_all(trainable, layouts[0]), self._constrain_all(non_trainable, layouts[1])

    def _constrain_all(self, values: Values, layouts: Sequence[Axes]) -> Values:
        return [self._constrain(value, axes) for value, axes in zip(values, layouts, strict=True)]

    def _constrain(self, value: Any, axes: Axes) -> Any:
        return jax.lax.with_sharding_constraint(value, NamedSharding(self._mesh, PartitionSpec(*axes)))


def uncompiled_step(
    model: Any, placement: Placement, data: Batch, devices: Sequence[Any] | None = None
) -> UncompiledStep:
    """Return the training step of a model for a global batch like `data`; see the top of this file.

    Args:
        model: A model compiled in the scope of a strategy, with all variables created if that needs no batch.
        placement: The strategy's placement.
        data: `(x, y, sample_weight)`: anything with shape and dtype.
        devices: Other devices, as many as the mesh has; None: the mesh's.
    """
    with placement_scope(placement):
        model._symbolic_build(data_batch=data)
    placed = PlacedModel(model, placement)
    placed.place()
    target = placement if devices is None else placement.on_devices(devices)
    programs = StepPrograms(model, placed, target, BatchPacking())
    mesh = target.mesh.backend_mesh
    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple(
        [_abstract(variable, sharding) for variable, sharding in zip(variables, shardings, strict=True)]
        for variables, shardings in zip(lists, placed.shardings(mesh), strict=True)
    )
    batch = map_leaves(lambda array: _abstract(array, placed.batch_sharding(tuple(array.shape), mesh)), data)
    return UncompiledStep(programs.compile_train(), (state, batch))


def _abstract(array: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(array.shape), jax.dtypes.canonicalize_dtype(str(array.dtype)), sharding=sharding)
