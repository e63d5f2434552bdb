"""Python state of a program outside of Keras's layers, metrics and optimizers: a loss that counts its calls, a schedule
object that a layer holds, closure variables, and global variables."""

from __future__ import annotations

from collections.abc import Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

import keras

from phalanx.keras_compat.model_state import compiled_losses, custom_layers, has_comparisons, names_in
from phalanx.keras_compat.program_classes import is_of_program

KERAS_PARTS = (keras.layers.Layer, keras.Variable, keras.optimizers.Optimizer, keras.metrics.Metric)

_DEPTH = 4
"""Maximum depth of nested objects and collections to search."""
_MAX_ITEMS, _MAX_BYTES = 1000, 1 << 20
"""Limits above which collections and arrays count as data, not state."""


_SIZES = {"shape", "get_shape", "size", "numel", "len"}
_LIMITS = {"min", "max", "minimum", "maximum", "clip", "clamp", "clip_by_value"}
_BEFORE_STEPS = {"__init__", "build", "compute_output_shape", "compute_output_spec", "get_config", "from_config"}
"""Methods that no step calls."""


class VariableSlot:
    """A closure or global variable that a function of the program reads and assigns.

    Args:
        owner: The dictionary of a module, or a function's cell.
        name: Name in the module; "" for a cell.

    Attributes:
        key: Key of the variable, stable while its owner lives.
    """

    def __init__(self, owner: dict[str, Any] | CellType, name: str = "") -> None:
        self._owner = owner
        self._name = name
        self.key = id(owner), name

    def get(self) -> Any:
        return self._owner.cell_contents if isinstance(self._owner, CellType) else self._owner[self._name]

    def set(self, value: Any) -> None:
        if isinstance(self._owner, CellType):
            self._owner.cell_contents = value
        else:
            self._owner[self._name] = value


class ProgramObjects:
    """Objects that are reachable from the attributes and methods of other objects.

    Args:
        owners: Parts of a model, or losses, which are included themselves.

    Attributes:
        objects: Instances of the program's classes.
        functions: Functions of the program.
        variables: Closure variables of the program's functions, and the globals that they use.
        iterators: Whether there are iterators, which lose the items that are read from them.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        self._seen: set[int] = set()
        self._variables: dict[tuple[int, str], VariableSlot] = {}
        self.objects: list[Any] = []
        self.functions: list[FunctionType] = []
        self.iterators = False
        for owner in owners:
            if not isinstance(owner, KERAS_PARTS):
                self._visit(owner, _DEPTH)
            self._visit_all(_members_of(owner), _DEPTH)

    @property
    def variables(self) -> list[VariableSlot]:
        return list(self._variables.values())

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, MethodType):
            value = value.__self__
        if not depth or id(value) in self._seen:
            return
        self.iterators = self.iterators or hasattr(type(value), "__next__")
        if isinstance(value, dict | list | tuple):
            if len(value) <= _MAX_ITEMS:
                self._visit_all(value.values() if isinstance(value, dict) else value, depth - 1)
        elif isinstance(value, FunctionType):
            self._seen.add(id(value))
            # An empty cell belongs to a variable that has no value yet.
            used = [VariableSlot(cell) for cell in value.__closure__ or () if cell != CellType()]
            if is_of_program(value):
                self.functions.append(value)
                known = value.__globals__
                used += [VariableSlot(known, name) for name in names_in(value) if name in known]
                self._visit(getattr(value, "__wrapped__", None), depth - 1)
            self._variables.update((slot.key, slot) for slot in used)
            self._visit_all([slot.get() for slot in used], depth - 1)
        elif hasattr(value, "__dict__") and not isinstance(value, KERAS_PARTS) and is_of_program(type(value)):
            self._seen.add(id(value))
            self.objects.append(value)
            self._visit_all(_members_of(value), depth - 1)

    def _visit_all(self, values: Iterable[Any], depth: int) -> None:
        for value in list(values):
            self._visit(value, depth)


def reads_iterators(model: Any) -> bool:
    """Whether custom steps, layers or losses may read from iterators; a trial of them would lose those items.

    Args:
        model: A compiled model.
    """
    return ProgramObjects([model, *custom_layers(model), *compiled_losses(model)]).iterators


def may_depend_on_size(model: Any) -> bool:
    """Whether custom steps, layers or losses may compute differently if a batch has more samples: they read a size, and
    compare or limit a number.

    Args:
        model: A compiled model.
    """
    found = ProgramObjects([model, *custom_layers(model), *compiled_losses(model)]).functions
    return any(_limits_a_size(function) for function in found if function.__name__ not in _BEFORE_STEPS)


def _limits_a_size(function: FunctionType) -> bool:
    names = names_in(function)
    return bool(names & _SIZES) and (bool(names & _LIMITS) or has_comparisons(function))


def _members_of(owner: Any) -> list[Any]:
    """Return the attributes of an object, and the methods of its classes that the program defines."""
    kinds = [kind for kind in type(owner).__mro__ if is_of_program(kind)]
    return [*vars(owner).values(), *(value for kind in kinds for value in vars(kind).values())]


def is_large(value: Any) -> bool:
    """Whether a value of the program is data rather than state."""
    if getattr(value, "nbytes", 0) > _MAX_BYTES:
        return True
    return isinstance(value, list | tuple | dict | set) and len(value) > _MAX_ITEMS
