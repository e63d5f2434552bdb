"""Calls of the host from a graph that a session runs, as in TensorFlow 1.

A session runs whatever is ready, in any order, while in a `tf.function` the order is that of the program. So
collectives of one `session.run` may begin in another order on each rank. They are negotiated by name, which makes any
order right, but each holds one of the session's threads until all ranks have come to it. If there were as few threads
as cores, two ranks could fill theirs with different collectives, and wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from phalanx.config.environment import process_environment, set_variables

SESSION_THREADS = 64
"""Threads that sessions run operations on. Most of them wait for other ranks, which takes no core. Programs reduce
dozens of tensors one by one, rarely more."""

_THREADS_VARIABLE = "TF_NUM_INTEROP_THREADS"
"""TensorFlow reads it when the process creates its first session or runs its first eager operation. A ConfigProto may
say otherwise for its session."""


def is_for_session() -> bool:
    """Whether the present graph, or the one around it, is run by a session."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def reserve_threads() -> None:
    """Let the sessions of this process have enough threads for collectives; call this before the first one exists."""
    present = process_environment().get(_THREADS_VARIABLE, "")
    if not (present.isdecimal() and int(present) >= SESSION_THREADS):
        set_variables({_THREADS_VARIABLE: str(SESSION_THREADS)})


def call_in_session(function: Callable[..., Any], tensors: Sequence[Any], dtypes: Sequence[Any]) -> Any:
    """As `call_in_graph`, in a graph that a session runs: without an order."""
    reserve_threads()
    return tf.numpy_function(function, tensors, dtypes)
