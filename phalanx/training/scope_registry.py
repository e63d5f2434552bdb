"""Names of the objects that a program creates inside a scope, equal on every task because all run the same program.

So a task can refer to its model, optimizer or metric in a message without sending it.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any, NamedTuple

import keras

from phalanx.keras_compat.trainer_hook import OBJECT_KINDS

KINDS = OBJECT_KINDS
"""Classes of objects that are named; models are layers."""


class ScopedName(NamedTuple):
    """Name of the `number`-th object of its class, from 0."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"number {self.number + 1} of class {self.kind.rpartition('.')[2]}"


class ScopeRegistry:
    """The Keras layers (including models), optimizers and metrics created in the scope, in order."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        # Weak, because a program may drop an object and create it again.
        self._names: weakref.WeakKeyDictionary[Any, ScopedName] = weakref.WeakKeyDictionary()
        # Objects that can be found, kept alive; None until the first message that names an object.
        self._frozen: dict[ScopedName, Any] | None = None
        self._by_kind: dict[type, list[tuple[ScopedName, Any]]] = {}

    def register(self, obj: Any) -> None:
        """Name an object; only once, although the constructors of its base classes may call this again."""
        if obj in self._names:
            return
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        self._names[obj] = ScopedName(kind, self._counts[kind])
        self._counts[kind] += 1

    def assign_name(self, name: ScopedName, obj: Any) -> None:
        """Give an object the name that another task gave to its counterpart."""
        self._names[obj] = name
        self._frozen = {**(self._frozen or {}), name: obj}
        self._by_kind.clear()

    def freeze(self, *, include_new: bool = False) -> None:
        """Keep the objects created so far; from here on, only these can be found.

        Args:
            include_new: Whether to also keep the objects created since the last call.
        """
        if self._frozen is None:
            gc.collect()  # dropped objects disappear on every task, not only where the collector has run
            self._frozen = self.present()
        elif include_new:
            self._frozen = {**self.present(), **self._frozen}
            self._by_kind.clear()

    def present(self) -> dict[ScopedName, Any]:
        """Return the existing objects, in the order in which they were created."""
        return {name: obj for obj, name in self._names.items()}

    def name_of(self, obj: Any) -> ScopedName | None:
        """Return the name of an object; None if it was not created in the scope."""
        return self._names.get(obj) if isinstance(obj, KINDS) else None

    def find(self, name: ScopedName) -> Any:
        """Return the object with this name; None if it did not exist when `freeze` was called."""
        return (self.present() if self._frozen is None else self._frozen).get(name)

    def layers(self) -> list[tuple[ScopedName, Any]]:
        return self._of_kind(keras.layers.Layer)

    def optimizers(self) -> list[tuple[ScopedName, Any]]:
        return self._of_kind(keras.optimizers.Optimizer)

    def metrics(self) -> list[tuple[ScopedName, Any]]:
        return self._of_kind(keras.metrics.Metric)

    def _of_kind(self, kind: type) -> list[tuple[ScopedName, Any]]:
        if self._frozen is None:
            return []
        if kind not in self._by_kind:
            self._by_kind[kind] = [(name, obj) for name, obj in self._frozen.items() if isinstance(obj, kind)]
        return self._by_kind[kind]
