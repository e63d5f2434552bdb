"""All state that a step of a program can change, so that a step can be tried and undone."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from phalanx.engines import buffers
from phalanx.engines.random_state import random_state, set_random_state
from phalanx.keras_compat import model_state
from phalanx.keras_compat.keras_internals import global_seed_generator
from phalanx.keras_compat.observation.variable_assignments import (
    TensorFlowVariable,
    outside_of_functions,
    raw_of,
    watched_assignments,
)
from phalanx.keras_compat.variables.host_values import host_copy
from phalanx.training.program_effects import program_random_state
from phalanx.training.program_effects.program_objects import KERAS_PARTS, ProgramObjects, VariableSlot, is_large
from phalanx.training.state_sync import seed_generators, variables_of

Array = np.ndarray[Any, Any]

OTHER_SEED = 0x5EED_0DD
"""A seed that no program is likely to choose."""


class ProgramState:
    """State of a model, its optimizers and metrics, and of what the program keeps with them.

    It comprises variables, including those created or first assigned later; attributes that are numbers, strings,
    arrays or collections; and the states of random number generators. Files and other effects outside of the model are
    not undone.

    Args:
        model: The model. Parts that are not built yet keep what they receive when they are built.
        trains: Whether weights and optimizers may change too. If not, they are not copied.
    """

    def __init__(self, model: Any, *, trains: bool = True) -> None:
        self._model = model
        # By ID, with the variable itself, so that no other object can reuse the ID.
        self._variables: dict[int, tuple[Any, Array]] = {}
        self._raws: dict[int, Any] = {}  # likewise, the backend variables that hold their values
        layers = model._flatten_layers()
        parts = [*layers, *model.metrics, *(model_state.optimizers(model) if trains else [])]
        parts = [part for part in parts if part is model or getattr(part, "built", True)]
        weights = set() if trains else {id(weight) for layer in layers for weight in layer._trainable_variables}
        held_variables = [variable for part in parts for variable in _held_variables(vars(part))]
        own = variables_of(model) if trains else [*model.non_trainable_variables, *buffers(model)]
        variables = [*own, *model.metrics_variables, *held_variables]
        self.record_variables(variable for variable in variables if id(variable) not in weights)
        unique = list({id(part): part for part in parts}.values())
        self._in_python = PythonState(unique, model_state.compiled_losses(model))
        self._random = program_random_state.states(), random_state(), _tensorflow_random()
        self._gradients = [(tensor, tensor.grad) for tensor in _parameters(model)]
        self._restore_gradients()  # with a copy, because steps add to gradients in place

    def record_variables(self, variables: Iterable[Any]) -> None:
        """Record the values of variables that are not known yet."""
        for variable in variables:
            if id(variable) not in self._variables:
                self._variables[id(variable)] = variable, host_copy(variable)
                if (raw := raw_of(variable)) is not None:
                    self._raws[id(raw)] = raw

    @contextmanager
    def restored_on_exit(self) -> Iterator[None]:
        """Restore the state at the end of the context."""

        def found(variable: Any) -> None:
            with outside_of_functions():
                self.record_variables([variable])

        def found_raw(raw: Any) -> None:
            if id(raw) not in self._raws:
                found(TensorFlowVariable(raw))
                self._raws[id(raw)] = raw

        with watched_assignments(found, found_raw):
            try:
                yield
            finally:
                self.restore()

    def restore_python(self) -> None:
        """Undo changes to attributes and objects of the program."""
        self._in_python.restore()

    def variables(self) -> list[tuple[Any, Array]]:
        """Return the variables that are known so far, with their initial values."""
        return list(self._variables.values())

    def restore(self) -> None:
        """Undo all changes."""
        self.restore_python()
        for variable, value in self.variables():
            if not np.array_equal(host_copy(variable), value):
                variable.assign(value)
        self._restore_gradients()
        self._model._clear_losses()
        of_program, of_backend, of_tensorflow = self._random
        program_random_state.restore_states(of_program)
        set_random_state(of_backend)
        if of_tensorflow is not None:
            of_tensorflow[0].setstate(of_tensorflow[1])

    def _restore_gradients(self) -> None:
        for tensor, gradient in self._gradients:
            tensor.grad = None if gradient is None else gradient.clone()

    def _seed_generators(self) -> list[Any]:
        everywhere = global_seed_generator()
        return [*seed_generators(self._model), *([] if everywhere is None else [everywhere])]

    def change_seeds(self) -> None:
        """Change the seeds of all random number generators, until `restore`."""
        for generator in self._seed_generators():
            generator.state.assign(host_copy(generator.state) + 1)
        random.seed(OTHER_SEED)
        np.random.seed(OTHER_SEED)
        if (generator := _tensorflow_random()) is not None:
            generator[0].seed(OTHER_SEED)
        if keras.backend.backend() == "torch":
            import torch

            torch.manual_seed(OTHER_SEED)


class PythonState:
    """Attributes of a model's parts, and state in objects and functions of the program.

    Args:
        parts: Layers, metrics and optimizers.
        others: Losses of the model.
    """

    def __init__(self, parts: Sequence[Any], others: Sequence[Any] = ()) -> None:
        held = ProgramObjects([*parts, *others])
        self._saved: list[_Attributes | _Variable] = [_Attributes(part) for part in parts]
        self._saved += [_Attributes(each, is_custom=True) for each in held.objects]
        self._saved += [_Variable(slot) for slot in held.variables]

    def restore(self) -> None:
        """Undo all changes."""
        for each in self._saved:
            each.restore()


def _held_variables(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the variables in a part's attributes, including those that Keras does not track, such as recurrent states.

    Args:
        value: The attributes, or the value of one of them.
        depth: Maximum number of nested collections to search.
    """
    if isinstance(value, keras.Variable):
        yield value
    elif depth and isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _held_variables(each, depth - 1)


class _Attributes:
    """Attributes of an object in which a step may count or collect.

    Args:
        is_custom: Whether its class is the program's, and not part of Keras.
    """

    def __init__(self, owner: Any, *, is_custom: bool = False) -> None:
        self._owner = owner
        self._names = set(vars(owner))
        self._saved: list[tuple[str, Any, Callable[[], None]]] = []
        for name, value in vars(owner).items():
            is_counter = isinstance(value, int | float) and not isinstance(value, bool)
            restore = None if is_custom and is_large(value) else _make_restore(value)
            # Private attributes are mostly Keras's bookkeeping for what was built, and what was built stays. Private
            # numbers may be counters of the program.
            if restore is not None and name != "built" and (is_custom or is_counter or not name.startswith("_")):
                self._saved.append((name, value, restore))

    def restore(self) -> None:
        now = vars(self._owner)
        for name in [name for name in now if name not in self._names and not name.startswith("_")]:
            if not isinstance(now[name], KERAS_PARTS):
                del now[name]
        for name, value, restore in self._saved:
            now[name] = value
            restore()


class _Variable:
    """A closure variable or global of a function of the program, in which the function may count or collect."""

    def __init__(self, slot: VariableSlot) -> None:
        self._slot = slot
        self._value = slot.get()
        self._restore = None if is_large(self._value) else _make_restore(self._value)

    def restore(self) -> None:
        if self._restore is not None:
            self._slot.set(self._value)
            self._restore()


def _make_restore(value: Any) -> Callable[[], None] | None:
    """Return a function that restores a value's current content; None if there is no known way."""
    if isinstance(value, model_state.PLAIN) or type(value).__module__.startswith("jax"):
        return _nothing
    if isinstance(value, np.random.Generator):
        numbers, state = value.bit_generator, copy.deepcopy(value.bit_generator.state)
        return lambda: setattr(numbers, "state", state)
    if isinstance(value, np.random.RandomState):
        of_numpy = value.get_state()
        return lambda: value.set_state(of_numpy)
    if isinstance(value, random.Random):
        of_python = value.getstate()
        return lambda: value.setstate(of_python)
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: np.copyto(value, array)
    if isinstance(value, list | deque | dict | set):
        return _make_collection_restore(value)
    return _make_tensor_restore(value)


def _make_collection_restore(value: Any) -> Callable[[], None]:
    items = copy.copy(list(value.items()) if isinstance(value, dict) else list(value))
    inside = [_make_restore(each[1] if isinstance(value, dict) else each) or _nothing for each in items]
    kind = next(each for each in (list, deque, OrderedDict, dict, set) if isinstance(value, each))
    extend = kind.extend if kind in (list, deque) else kind.update  # type: ignore[union-attr]

    def restore() -> None:  # bypasses Keras's tracking of the items
        for each in _stores(value):
            kind.clear(each)
            extend(each, items)  # type: ignore[operator]
        for each in inside:
            each()

    return restore


def _stores(collection: Any) -> list[Any]:
    """Return the containers of the items: TensorFlow wraps dictionaries, and stores the items of lists twice."""
    if hasattr(collection, "__wrapped__"):
        return [collection.__wrapped__]
    storage = getattr(collection, "_storage", None)
    return [collection] if storage is None else [collection, storage]


def _make_tensor_restore(value: Any) -> Callable[[], None] | None:
    module = type(value).__module__
    if module.startswith("torch") and hasattr(value, "detach"):
        tensor = value.detach().clone()
        return lambda: _nothing(value.data.copy_(tensor))
    if module.startswith("tensorflow"):
        if not hasattr(value, "assign"):
            return _nothing if hasattr(value, "numpy") else None
        array = value.numpy()
        return lambda: _nothing(value.assign(array))
    return None


def _parameters(model: Any) -> list[Any]:
    """Return PyTorch's tensors that have gradients, to which a step may add."""
    if keras.backend.backend() != "torch":
        return []
    return [variable.value for variable in model.trainable_variables if variable.value.requires_grad]


def _tensorflow_random() -> tuple[random.Random, Any] | None:
    """Return TensorFlow's seed generator and its state, if there is one."""
    if keras.backend.backend() != "tensorflow":
        return None
    from tensorflow.python.eager import context

    generator = getattr(context.context(), "_rng", None)
    return None if generator is None else (generator, generator.getstate())


def _nothing(_: Any = None) -> None:
    pass
