"""Give all ranks the variables of one. Names and meaning are Horovod's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from phalanx.horovod.object_collectives import allgather_object, broadcast_object
from phalanx.horovod.process_sets import ProcessSet, global_process_set
from phalanx.horovod.tensorflow.mpi_ops import broadcast_


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Overwrite variables with the values that they have on rank `root_rank`.

    Args:
        variables: of TensorFlow or Keras (`model.variables`, `optimizer.variables`), alike on all ranks.
        root_rank: rank in the job whose values are sent.
        process_set: the ranks that take part.
        inplace: ignored; the result is the same.
    """
    broadcast_([tensorflow_variable(variable) for variable in variables], root_rank, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that gives all ranks the object of rank `root_rank`, see `broadcast_object`. `session` is ignored."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def tensorflow_variable(variable: Any) -> Any:
    """The TensorFlow variable inside a Keras variable; any other variable is returned unchanged."""
    return variable if callable(getattr(variable, "value", None)) else getattr(variable, "value", variable)


__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables", "tensorflow_variable"]
