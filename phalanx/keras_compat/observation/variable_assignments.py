"""Observes which variables code creates and assigns, also those that belong to no model.

Patches `keras.Variable.__init__` and `assign`, and `assign`, `assign_add` and `assign_sub` of TensorFlow's variables,
which Keras's optimizers call without `keras.Variable`. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import keras

from phalanx.keras_compat.keras_internals import in_stateless_scope
from phalanx.keras_compat.patching import PatchedFunction, defining_class

INTERNAL_PREFIX = "phalanx"
"""Prefix of the names of engines' variables, which are not state of the program."""


class TensorFlowVariable:
    """A `tf.Variable` outside of any `keras.Variable`, with the interface of one."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.path = str(raw.name).partition(":")[0]

    @property
    def value(self) -> Any:
        return self._raw.value()

    def assign(self, value: Any) -> None:
        self._raw.assign(value)


def raw_of(variable: Any) -> Any:
    """Return the `tf.Variable` of a `keras.Variable`; None on other backends."""
    return getattr(variable, "_value", None) if keras.backend.backend() == "tensorflow" else None


def outside_of_functions() -> AbstractContextManager[Any]:
    """Context in which variables have values, even while TensorFlow traces a function that is called."""
    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    scope: AbstractContextManager[Any] = tf.init_scope()
    return scope


@contextmanager
def watched_assignments(on_variable: Callable[[Any], None], on_raw_variable: Callable[[Any], None]) -> Iterator[None]:
    """Context in which variables are reported after their creation and before each assignment. Stateless scopes are
    excluded: there, values are arguments and results of a trace, and the variable itself does not change.

    Args:
        on_variable: Called with a `keras.Variable`.
        on_raw_variable: Called with a `tf.Variable`, which may be the one of a `keras.Variable`.
    """

    def create(variable: Any, *args: Any, **kwargs: Any) -> None:
        creating.original(variable, *args, **kwargs)
        if getattr(variable, "_value", None) is not None and not in_stateless_scope():
            on_variable(variable)

    def assign(variable: Any, value: Any) -> Any:
        if not in_stateless_scope():
            on_variable(variable)
        return assigning.original(variable, value)

    creating = PatchedFunction(defining_class(keras.Variable, "__init__"), "__init__", create)
    assigning = PatchedFunction(defining_class(keras.Variable, "assign"), "assign", assign)
    with ExitStack() as stack:
        stack.enter_context(creating)
        stack.enter_context(assigning)
        for patch in _of_tensorflow(on_raw_variable):
            stack.enter_context(patch)
        yield


def _of_tensorflow(on_raw_variable: Callable[[Any], None]) -> list[PatchedFunction]:
    if keras.backend.backend() != "tensorflow":
        return []
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # redefines the methods of its base

    def watched(name: str) -> PatchedFunction:
        def assign(variable: Any, *args: Any, **kwargs: Any) -> Any:
            if not variable.name.startswith(INTERNAL_PREFIX):
                on_raw_variable(variable)
            return patch.original(variable, *args, **kwargs)

        patch = PatchedFunction(ResourceVariable, name, assign)
        return patch

    return [watched(name) for name in ("assign", "assign_add", "assign_sub")]
