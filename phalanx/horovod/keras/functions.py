"""Horovod's functions of tensors, for the backend that Keras runs on; variables and models of Keras."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from phalanx.horovod import operations
from phalanx.horovod.compression import Compression
from phalanx.horovod.interface import Interface, check_kept
from phalanx.horovod.operation_request import Array, HorovodOp
from phalanx.horovod.operations import Average
from phalanx.horovod.process_sets import ProcessSet, global_process_set


def _from_host(array: Array) -> Any:
    tensor = keras.ops.convert_to_tensor(array)
    check_kept(array, keras.backend.standardize_dtype(tensor.dtype))
    return tensor


interface = Interface(lambda tensor: np.asarray(keras.ops.convert_to_numpy(tensor)), _from_host)


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Put the values of rank `root_rank`'s Keras variables into everybody's in the process set; they travel as one.

    Raises: HorovodInternalError if the ranks' variables differ in number, shape or dtype.
    """
    if not process_set.included():
        return
    variables = list(variables)
    values: list[Array] = [np.asarray(keras.ops.convert_to_numpy(variable.value)) for variable in variables]
    pending = operations.broadcast(values, root_rank, name="broadcast_variables", process_set=process_set, wake=False)
    for variable, value in zip(variables, pending.wait(), strict=True):
        variable.assign(value)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: HorovodOp | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The value, a tensor or what can be made one, merged over the ranks; Average if `op` is not given.

    The arguments stand in the order of `horovod.keras`, which is another than that of `horovod.torch`.
    """
    return interface.allreduce(
        value, average, name, compression, op, prescale_factor, postscale_factor, process_set=process_set
    )


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The ranks' values joined along the first dimension, which may differ."""
    return interface.allgather(value, name, process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Rank `root_rank`'s value."""
    return interface.broadcast(value, root_rank, name, process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: HorovodOp = Average,
    process_set: ProcessSet = global_process_set,
    **factors: float,
) -> Any:
    """The values merged over the ranks, of which each rank gets a part of the rows.

    Args:
        factors: `prescale_factor`, `postscale_factor`.
    """
    return interface.reducescatter(value, name=name, op=op, process_set=process_set, **factors)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
) -> Any:
    """A saved Keras model, with its optimizer and that one's state made a `DistributedOptimizer`.

    Args:
        filepath: as for `keras.models.load_model`.
        custom_optimizers: classes of optimizers of one's own.
        custom_objects: as for `keras.models.load_model`.
        compression: as for `DistributedOptimizer`.
    """
    from phalanx.horovod.keras.optimizer import DistributedOptimizer

    objects = {each.__name__: each for each in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
