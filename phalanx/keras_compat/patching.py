"""A function of Keras replaced by another for the time of a step, where Keras has no hook for it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


class PatchedFunction:
    """A context in which `module.name` is `replacement`, which finds what it replaces in `original`.

    It may be entered again and again (not while it is entered). The replacement is one object for all steps:
    compilers guard on the identity of the functions that they see.
    """

    original: Callable[..., Any]

    def __init__(self, module: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
        self._module = module
        self._name = name
        self._replacement = replacement

    def __enter__(self) -> None:
        self.original = getattr(self._module, self._name)
        setattr(self._module, self._name, self._replacement)

    def __exit__(self, *error: object) -> None:
        setattr(self._module, self._name, self.original)
