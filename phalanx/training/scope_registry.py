"""What a program makes inside a scope, by name: the same name on every task, since all run the same program.

So a task can speak to another one of its own model, optimizer or metric, without sending it.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any, NamedTuple

import keras

KINDS = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
"""What is named; models are layers."""


class ScopedName(NamedTuple):
    """The `number`-th object of its class that was made."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"number {self.number + 1} of class {self.kind.rpartition('.')[2]}"


class ScopeRegistry:
    """The Keras layers (models too), optimizers and metrics that were made, in order."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        # Weak, as a program may drop what it made and make it again.
        self._names: weakref.WeakKeyDictionary[Any, ScopedName] = weakref.WeakKeyDictionary()
        self._settled: dict[ScopedName, Any] | None = None
        self._by_kind: dict[type, list[tuple[ScopedName, Any]]] = {}

    def note(self, made: Any) -> None:
        """Name an object; once, though its base classes may ask for it again."""
        if made in self._names:
            return
        kind = f"{type(made).__module__}.{type(made).__qualname__}"
        self._names[made] = ScopedName(kind, self._counts[kind])
        self._counts[kind] += 1

    def settle(self) -> None:
        """From now on what was made until now is kept, and nothing else can be found."""
        if self._settled is None:
            gc.collect()  # what is dropped is gone on every task, not just where the collector came by
            self._settled = {name: made for made, name in self._names.items()}

    def name_of(self, thing: Any) -> ScopedName | None:
        """The name of an object that was made in a scope; None if it was not."""
        return self._names.get(thing) if isinstance(thing, KINDS) else None

    def find(self, name: ScopedName) -> Any:
        """The object of a name; None if there was none when `settle` was called."""
        return (self._settled or {}).get(name)

    def layers(self) -> list[tuple[ScopedName, Any]]:
        return self._of(keras.layers.Layer)

    def optimizers(self) -> list[tuple[ScopedName, Any]]:
        return self._of(keras.optimizers.Optimizer)

    def metrics(self) -> list[tuple[ScopedName, Any]]:
        return self._of(keras.metrics.Metric)

    def _of(self, kind: type) -> list[tuple[ScopedName, Any]]:
        if self._settled is None:
            return []
        if kind not in self._by_kind:
            self._by_kind[kind] = [(name, made) for name, made in self._settled.items() if isinstance(made, kind)]
        return self._by_kind[kind]
