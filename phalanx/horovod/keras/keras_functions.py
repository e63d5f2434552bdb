"""Horovod's tensor functions for the current Keras backend, and functions for Keras variables and models."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from phalanx.errors import UnsupportedError
from phalanx.horovod import operations
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.compressors import Compression
from phalanx.horovod.framework_bindings import ArrayFramework, check_integers_preserved
from phalanx.horovod.jax_tracers import refuse_tracer
from phalanx.horovod.operation_request import Array, OperationKind


def _to_array(tensor: Any) -> Array:
    if keras.backend.backend() == "jax":
        refuse_tracer(tensor)
    return np.asarray(keras.ops.convert_to_numpy(tensor))


def _from_array(array: Array) -> Any:
    tensor = keras.ops.convert_to_tensor(array)
    check_integers_preserved(array, keras.backend.standardize_dtype(tensor.dtype))
    return tensor


_function = ArrayFramework(__name__, _to_array, _from_array).make_collective_function

allreduce = _function("allreduce", "value name average prescale_factor postscale_factor op compression process_set")
grouped_allreduce = _function("grouped_allreduce")
allgather = _function("allgather", "value name process_set")
grouped_allgather = _function("grouped_allgather")
broadcast = _function("broadcast", "value root_rank name process_set")
alltoall = _function("alltoall")
reducescatter = _function("reducescatter", "value name op process_set prescale_factor postscale_factor")
grouped_reducescatter = _function("grouped_reducescatter")


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Overwrite Keras variables with their values on rank `root_rank`; they travel together.

    Args:
        variables: Matching variables on all ranks of the process set.
        root_rank: Rank in the job whose values are sent.
        process_set: The ranks that take part; other ranks keep their values.
        inplace: Ignored.

    Raises: HorovodInternalError if the ranks' variables differ in number, shape or dtype.
    """
    if not process_set.included():
        return
    variables = list(variables)
    received = operations.run(
        OperationKind.BROADCAST,
        [_to_array(variable.value) for variable in variables],
        name="broadcast_variables",
        root_rank=root_rank,
        process_set=process_set,
    )
    for variable, value in zip(variables, received, strict=True):
        variable.assign(value)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved Keras model and convert its optimizer, with its state, to a `DistributedOptimizer`.

    If the saved optimizer had `backward_passes_per_step=k`, this one averages the gradients of k batches, with a
    warning: the file does not record whether they were summed.

    Args:
        filepath: See `keras.models.load_model`.
        custom_optimizers: Classes of custom optimizers.
        custom_objects: See `keras.models.load_model`.
        compression: See `DistributedOptimizer`.
        legacy_opts: Must be False: Keras 3 has no legacy optimizers.

    Raises: UnsupportedError: legacy_opts=True.
    """
    if legacy_opts:
        raise UnsupportedError("hvd.load_model(legacy_opts=True): Keras 3 has no legacy optimizers. Leave it out.")
    from phalanx.horovod.keras.keras_optimizer import DistributedOptimizer, accumulation_steps_of
    from phalanx.keras_compat.model_state import inner_optimizer

    objects = {each.__name__: each for each in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
        if (steps := accumulation_steps_of(inner_optimizer(model.optimizer))) > 1:
            warnings.warn(
                f"The loaded optimizer averages the gradients of {steps} batches. If it was saved from a "
                f"DistributedOptimizer with backward_passes_per_step={steps}, which adds them up unless "
                f"average_aggregated_gradients=True, gradients are {steps} times smaller now: multiply the learning "
                f"rate of SGD by {steps}.",
                stacklevel=2,
            )
    return model


__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "load_model",
    "reducescatter",
]
