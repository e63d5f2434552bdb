"""Broadcasts of variables and objects from one rank. Names and semantics are Horovod's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from phalanx.engines.replica.tensorflow.host_calls import is_session_graph
from phalanx.errors import UnsupportedError
from phalanx.horovod import object_collectives
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.tensorflow.mpi_ops import broadcast_


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables with their values on rank `root_rank`.

    Args:
        variables: Matching variables on all ranks, of TensorFlow or Keras (`model.variables`, `optimizer.variables`).
        root_rank: Rank in the job whose values are sent.
        process_set: The ranks that take part.
        inplace: Ignored; the result is the same.

    Returns: in a session's graph, the operation to pass to `session.run`; else None.
    """
    broadcast = broadcast_(
        [tensorflow_variable(variable) for variable in variables], root_rank, process_set=process_set
    )
    return tf.group(*broadcast) if is_session_graph() else None


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that overwrites all global variables of the current graph with those of rank `root_rank`.

    For TensorFlow 1 programs, after the variables have been created.

    Args:
        root_rank: Rank in the job whose values are sent.

    Raises: UnsupportedError in eager code, which has no list of all variables.
    """
    if tf.executing_eagerly():
        raise UnsupportedError(
            "broadcast_global_variables() needs the graph of TensorFlow 1, which knows all variables. In eager code, "
            "call broadcast_variables(model.variables, root_rank)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A TensorFlow 1 session hook that broadcasts the global variables of one rank after the session is created.

    So all ranks start with the same random weights, or with the checkpoint that the root restored.

    Args:
        root_rank: Rank in the job whose values are sent.
        device: Ignored; values travel through the host.
    """

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        self._root_rank = root_rank
        self._broadcast: Any = None
        self._graph: Any = None

    def begin(self) -> None:
        """Add the operation to the graph; called before the graph is finalized."""
        graph = tf.compat.v1.get_default_graph()
        if self._graph is not graph:
            self._graph, self._broadcast = graph, broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcast the variables; called after they are initialized."""
        session.run(self._broadcast)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a Python object from one rank to all.

    Args:
        obj: The object; ignored on ranks other than the root.
        root_rank: Rank in the job whose object is sent.
        session: Ignored; accepted for programs written for Horovod.
        name: Name of the operation; equal on all ranks.
        process_set: The ranks that take part.

    Returns: the object of the root.

    Raises: ConfigurationError in a job without a secret, or whose connections are not encrypted.
    """
    return object_collectives.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather a Python object from each rank.

    Args:
        obj: This rank's object.
        session: Ignored; accepted for programs written for Horovod.
        name: Name of the operation; equal on all ranks.
        process_set: The ranks that take part.

    Returns: the objects in rank order.

    Raises: ConfigurationError in a job without a secret, or whose connections are not encrypted.
    """
    return object_collectives.allgather_object(obj, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that calls `broadcast_object` with its argument and these options. `session` is ignored."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def tensorflow_variable(variable: Any) -> Any:
    """Return the TensorFlow variable inside a Keras variable; any other variable is returned unchanged."""
    return variable if callable(getattr(variable, "value", None)) else getattr(variable, "value", variable)


__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "tensorflow_variable",
]
