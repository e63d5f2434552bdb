"""Ways to patch Keras objects, classes and modules, and to undo the patches.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class PatchedFunction:
    """A context in which `owner.name` is `replacement`. The replaced function is in `original`.

    It can be entered again after it was left. The replacement is the same object each time, because compilers guard on
    the identity of the functions that they see.

    Args:
        owner: A module or a class.
        name: Name of the function.
        replacement: Called instead of the function.
    """

    original: Callable[..., Any]

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._replacement = replacement

    def __enter__(self) -> None:
        self.original = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._replacement)

    def __exit__(self, *error: object) -> None:
        setattr(self._owner, self._name, self.original)


class Patches:
    """Patches of classes and modules that last until `restore`."""

    def __init__(self) -> None:
        self._originals: dict[tuple[Any, str], Any] = {}

    def __contains__(self, place: tuple[Any, str]) -> bool:
        return place in self._originals

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace a function of a module, or a method of a class or its base, by the result of `wrap`."""
        # None if the class inherits it: `restore` then deletes the replacement.
        self._originals[owner, name] = vars(owner).get(name)
        setattr(owner, name, wrap(getattr(owner, name)))

    def restore(self) -> None:
        """Undo all replacements. Safe to call twice."""
        for (owner, name), original in self._originals.items():
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()


def defining_class(kind: type, name: str) -> type:
    """Return the class, or its base class, that defines this method."""
    return next(base for base in kind.__mro__ if name in vars(base))


def override_methods(target: Any, **methods: Any) -> None:
    """Override methods of one object.

    This bypasses Keras's attribute tracking, which would wrap the values or refuse them on a built object.
    """
    vars(target).update(methods)


def restore_methods(target: Any, *names: str) -> None:
    """Undo `override_methods`: the object has the methods of its class again."""
    for name in names:
        del vars(target)[name]


@contextmanager
def overridden_methods(target: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Context in which methods of one object are overridden, even if they already were."""
    # An earlier override of the same object is restored on exit: such contexts may be nested.
    before = {name: own for name, own in vars(target).items() if name in methods}
    override_methods(target, **methods)
    try:
        yield
    finally:
        restore_methods(target, *methods)
        override_methods(target, **before)


def set_untracked(target: Any, **values: Any) -> None:
    """Set attributes of a Keras object, bypassing its tracking, which would copy every list."""
    vars(target).update(values)


def insert_mixin(target: Any, mixin: type) -> None:
    """Insert a class before the class of one object. The class keeps its name, which Keras saves."""
    own = type(target)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    target.__class__ = type(own.__name__, (mixin, own), names)


def remove_mixin(target: Any) -> None:
    """Undo the last `insert_mixin`."""
    target.__class__ = type(target).__bases__[1]
