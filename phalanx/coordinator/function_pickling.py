"""Pickling of functions, arguments and results, with references to what every task has.

Objects created in the strategy's scope exist on every task, because all run the same program. So Keras models,
optimizers, metrics, layers and their variables, the strategy and the coordinator are sent as names. Tensors are sent as
host arrays. Everything else is sent by value (with cloudpickle, also functions and classes of the main program).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import keras

from phalanx.engines.tensors import Tensors
from phalanx.errors import UnsupportedError
from phalanx.runtime.pickling import dumps_with_references, explain_pickling_errors, loads_with_references
from phalanx.training.call_pickling import value_reducer
from phalanx.training.scope_registry import KINDS, ScopedName, ScopeRegistry

# The types that most of a pickle consists of, so that little time is spent on checking whether they are references.
_ALWAYS_BY_VALUE = frozenset(
    {
        *(str, bytes, int, float, bool, type(None), tuple, list, dict, set, frozenset, type),
        *(FunctionType, BuiltinFunctionType, CodeType, ModuleType),
    }
)


class References:
    """Objects that are sent as references, from this task or to it.

    Args:
        fixed: Objects that every task has, by name.
        scope_registry: Objects that the program created in scopes.
        tensors: Tensors of this task's backend.

    Attributes:
        reduce: Reduces an object that is not a reference, for pickling.
    """

    def __init__(self, fixed: Mapping[str, Any], scope_registry: ScopeRegistry, tensors: Tensors) -> None:
        self._fixed = dict(fixed)
        self._scope_registry = scope_registry
        self._tensors = tensors
        self.reduce = value_reducer(tensors)
        self._owners: dict[int, tuple[ScopedName, int]] = {}  # by id of the variable; rebuilt when one is not found

    def refer(self, thing: Any) -> tuple[Any, ...] | None:
        """The reference that is sent instead of an object; None if it is sent by value."""
        if type(thing) in _ALWAYS_BY_VALUE:
            return None
        for role, fixed in self._fixed.items():
            if thing is fixed:
                return "fixed", role
        if isinstance(thing, KINDS):
            return "scoped", *self._name(thing)
        if isinstance(thing, keras.Variable):
            name, index = self._owner(thing)
            return "variable", *name, index
        return self._other(thing)

    def _other(self, thing: Any) -> tuple[Any, ...] | None:
        if not keras.ops.is_tensor(thing) or self._tensors.pickle_reduce(thing) is not NotImplemented:
            return None  # ragged and sparse tensors are sent by their parts
        if hasattr(thing, "assign_add"):
            raise UnsupportedError(
                f"A {type(thing).__name__} that is no Keras variable would be a separate copy on each worker. Use "
                f"a weight of a layer or a metric that is made in strategy.scope()."
            )
        return "tensor", keras.ops.convert_to_numpy(thing)

    def load(self, reference: tuple[Any, ...]) -> Any:
        """The object on this task that a reference refers to."""
        kind, *rest = reference
        if kind == "fixed":
            return self._fixed[rest[0]]
        if kind == "tensor":
            return self._tensors.from_host(rest[0])
        name = ScopedName(*rest[:2])
        found = self._scope_registry.find(name)
        if found is None:
            raise _not_created_error(f"{name}")
        if kind == "scoped":
            return found
        variables = found.variables
        if rest[2] >= len(variables):
            raise UnsupportedError(f"Variable {rest[2]} of {name} does not exist on this task. Build it first.")
        return variables[rest[2]]

    def load_on_host(self, reference: tuple[Any, ...]) -> Any:
        """Load a reference like `load`, but tensors stay arrays."""
        if reference[0] != "tensor":
            return self.load(reference)
        array = reference[1]
        return array if array.ndim else array[()]

    def _name(self, thing: Any) -> ScopedName:
        name = self._scope_registry.name_of(thing)
        if name is None or self._scope_registry.find(name) is not thing:
            raise _not_created_error(f"The {type(thing).__name__} {getattr(thing, 'name', '')!r}")
        return name

    def owner(self, variable: Any) -> tuple[ScopedName, int] | None:
        """The object created in scope that the variable belongs to, and the variable's index; None if there is none."""
        if id(variable) not in self._owners:
            self._owners = {}
            registry = self._scope_registry
            for name, scoped in (*registry.layers(), *registry.optimizers(), *registry.metrics()):
                for index, own in enumerate(scoped.variables):
                    self._owners.setdefault(id(own), (name, index))
        return self._owners.get(id(variable))

    def _owner(self, variable: Any) -> tuple[ScopedName, int]:
        if (found := self.owner(variable)) is None:
            raise _not_created_error(f"What the variable {variable.path!r} belongs to")
        return found


def _not_created_error(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} was not created in strategy.scope() before the ClusterCoordinator, so not every task has it. Create "
        f"layers, models, optimizers and metrics there, on all tasks alike."
    )


def pack(thing: Any, references: References, what: str) -> bytes:
    """The pickle of an object.

    Args:
        what: Description of the object, for errors.

    Raises: UnsupportedError if it cannot be pickled.
    """
    with explain_pickling_errors(
        f"{what} cannot be sent to another task",
        "Create such objects inside the function, or with create_per_worker_values.",
    ):
        return dumps_with_references(thing, references.refer, references.reduce)


def unpack(data: bytes | memoryview, load: Callable[[tuple[Any, ...]], Any]) -> Any:
    """The object that was packed.

    Args:
        load: `References.load`, or `load_on_host`.
    """
    return loads_with_references(data, load)
