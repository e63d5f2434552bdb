"""References sent by the coordinator, in addition to what every task has: results, per-worker values, and large arrays
that functions refer to, which are sent to each worker once."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from phalanx.coordinator.change_detection import Trace, trace_references, traces_equal
from phalanx.coordinator.function_pickling import References, pack
from phalanx.coordinator.remote_values import PerWorkerValues, RemoteValue
from phalanx.engines.tensors import Tensors
from phalanx.training.scope_registry import KINDS, ScopedName, ScopeRegistry

MIN_STORED_BYTES = 1 << 16
"""Minimum size of arrays that are sent to each worker once, 64 KiB. Keeping track of smaller ones costs more."""
MAX_PICKLES = 16
"""Number of functions whose pickles are kept, the most recently used: a program schedules few functions, many times."""


@dataclass
class PickledReferences:
    """Objects that one pickle refers to.

    Attributes:
        names: Names of objects created in scopes.
        results: Results of functions, by number.
        per_worker: Per-worker values, which must stay alive until the pickle has been read.
        stored: Large arrays, by number.
    """

    names: set[ScopedName] = field(default_factory=set)
    results: dict[int, RemoteValue] = field(default_factory=dict)
    per_worker: list[PerWorkerValues] = field(default_factory=list)
    stored: dict[int, Any] = field(default_factory=dict)


class OutgoingReferences(References):
    """References of the coordinator. Only one thread at a time may pack with it; any may load.

    Args:
        accepts_later_objects: Returns whether objects created after the registry was settled may be referred to.
    """

    def __init__(
        self,
        fixed: Mapping[str, Any],
        scope_registry: ScopeRegistry,
        tensors: Tensors,
        accepts_later_objects: Callable[[], bool],
    ) -> None:
        super().__init__(fixed, scope_registry, tensors)
        self._accepts_later_objects = accepts_later_objects
        self._by_value = References(fixed, scope_registry, tensors)  # records nothing, so any thread may pack with it
        self._recorded = PickledReferences()  # of the current pickle, inside `recording`
        self._stores_arrays = False  # whether large arrays are currently references
        self._stored_numbers: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by id
        self._functions: dict[int, tuple[Trace, bytes, PickledReferences]] = {}  # by id; traces keep functions
        self.numbers = itertools.count()
        # Numbers without references. The garbage collector appends to it at any time.
        self.released_numbers: deque[int] = deque()

    @contextmanager
    def recording(self, *, stores_arrays: bool) -> Iterator[PickledReferences]:
        """Record the references of what is pickled inside the block.

        Args:
            stores_arrays: Whether large arrays are references; they are then assumed to be constant.
        """
        self._recorded, self._stores_arrays = PickledReferences(), stores_arrays
        try:
            yield self._recorded
        finally:
            self._recorded, self._stores_arrays = PickledReferences(), False

    def pack_function(self, function: Any, what: str) -> tuple[bytes, PickledReferences]:
        """The pickle of a function, created again only if something has changed, and the objects that it refers to."""
        with self.recording(stores_arrays=True):
            now = trace_references(function, self._is_constant, lambda thing: pack(thing, self, what))
        known = self._functions.pop(id(function), None)
        if known is None or not traces_equal(known[0], now):
            with self.recording(stores_arrays=True) as recorded:
                known = now, pack(function, self, what), recorded
        self._functions[id(function)] = known  # the most recently used at the end
        if len(self._functions) > MAX_PICKLES:
            del self._functions[next(iter(self._functions))]
        return known[1:]

    def _is_constant(self, thing: Any) -> bool:
        if isinstance(thing, (*KINDS, keras.Variable, RemoteValue, PerWorkerValues)) or _is_large(thing):
            return True
        return any(thing is fixed for fixed in self._fixed.values())

    def pack_stored(self, thing: Any) -> bytes:
        """The pickle of a large array; any thread may call it."""
        return pack(thing, self._by_value, "A large array")

    def number(self, thing: Any) -> int:
        """A number for an object. It is released with the object."""
        number = next(self.numbers)
        weakref.finalize(thing, self.released_numbers.append, number)
        return number

    def _other(self, thing: Any) -> tuple[Any, ...] | None:
        if isinstance(thing, RemoteValue):
            self._recorded.results[thing.number] = thing
            return "result", thing.number
        if isinstance(thing, PerWorkerValues):
            self._recorded.per_worker.append(thing)
            return "per_worker", thing.number
        if self._stores_arrays and _is_large(thing):
            number = self._number_of_stored(thing)
            self._recorded.stored[number] = thing
            return "stored", number
        return super()._other(thing)

    def _name(self, thing: Any) -> ScopedName:
        found = self._scope_registry.name_of(thing)
        if found is not None and self._scope_registry.find(found) is None and self._accepts_later_objects():
            self._scope_registry.freeze(include_new=True)
        name = super()._name(thing)
        self._recorded.names.add(name)
        return name

    def _number_of_stored(self, thing: Any) -> int:
        known = self._stored_numbers.get(id(thing))
        if known is not None and known[1]() is thing:  # an id alone may belong to a later object
            return known[0]
        self._stored_numbers = {key: entry for key, entry in self._stored_numbers.items() if entry[1]() is not None}
        number = self.number(thing)
        self._stored_numbers[id(thing)] = number, weakref.ref(thing)
        return number


def _is_large(thing: Any) -> bool:
    if isinstance(thing, np.ndarray):
        return thing.nbytes >= MIN_STORED_BYTES and not thing.dtype.hasobject
    return keras.ops.is_tensor(thing) and int(getattr(thing, "nbytes", 0)) >= MIN_STORED_BYTES
