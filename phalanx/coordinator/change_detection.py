"""Whether a function, with all that it refers to, is what it was when it was pickled.

Pickling a function of the main program takes milliseconds, and a program schedules the same one again and again. What
is compared: its code, the values of its closure, of its defaults and of the globals that it names, and so on for the
functions and classes among these. What can change inside is compared by its pickle, which is small as a rule; what
travels as a reference, or is taken to be constant, by its identity.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

_BY_VALUE = (str, bytes, int, float, complex, bool, type(None))
_BY_IDENTITY = (type, ModuleType, BuiltinFunctionType, CodeType)

Trace = list[tuple[bool, Any]]
"""What was met, in order: whether it is compared by identity, and itself."""


def trace(function: Any, is_constant: Callable[[Any], bool], pickled: Callable[[Any], bytes]) -> Trace:
    """The objects that a function refers to.

    Args:
        is_constant: Whether a thing travels as a reference, or is taken to be constant.
        pickled: The pickle of a thing that is neither.
    """
    found: Trace = []  # keeps what it compares by identity alive, so that no other object gets its id
    seen: set[int] = set()
    left = [function]
    while left:
        thing = left.pop()
        if isinstance(thing, _BY_VALUE):
            found.append((False, (type(thing), thing)))
            continue
        if id(thing) in seen:  # functions may refer to each other
            found.append((True, thing))
            continue
        seen.add(id(thing))
        if isinstance(thing, type) and _travels_along(thing):
            found.append((True, thing))
            left += [*thing.__bases__, *_members(thing)]
        elif isinstance(thing, _BY_IDENTITY) or is_constant(thing):
            found.append((True, thing))
        elif isinstance(thing, property):
            left += [thing.fget, thing.fset, thing.fdel]
        elif isinstance(thing, FunctionType):
            found.append((True, thing))
            found.append((True, thing.__code__))
            left.extend(_parts(thing))
        elif isinstance(thing, MethodType):
            left += [thing.__func__, thing.__self__]
        elif isinstance(thing, functools.partial):
            left += [thing.func, thing.args, *thing.keywords, *thing.keywords.values()]
        elif isinstance(thing, weakref.ref):  # as TensorFlow binds methods that it has compiled
            left.append(thing())
        elif type(thing) is tuple:
            found.append((False, len(thing)))
            left.extend(thing)
        elif isinstance(inner := _wrapped(thing), FunctionType):
            found.append((True, thing))
            left.append(inner)
        else:
            found.append((False, pickled(thing)))
    return found


def same(one: Trace, other: Trace) -> bool:
    """Whether two traces are of the same things."""
    return len(one) == len(other) and all(
        by_identity == again and (left is right if by_identity else left == right)
        for (by_identity, left), (again, right) in zip(one, other, strict=True)
    )


def _parts(function: FunctionType) -> Iterator[Any]:
    if not _travels_along(function):
        return  # but by its name
    yield function.__defaults__
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            yield None
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield function.__globals__[name]


def _travels_along(thing: Any) -> bool:
    """Whether cloudpickle sends the code of a function or class, instead of the name by which it is imported."""
    return thing.__module__ == "__main__" or "<locals>" in thing.__qualname__


def _members(cls: type) -> Iterator[Any]:
    """The members of a class, without those that Python itself adds."""
    for name, member in vars(cls).items():
        if not isinstance(member, GetSetDescriptorType | MemberDescriptorType) and not name.startswith("_abc_"):
            yield name
            yield member


def _names(code: CodeType) -> set[str]:
    """The globals that code may use, that of functions inside it included."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _wrapped(thing: Any) -> Any:
    """The Python function that a backend has compiled."""
    return getattr(thing, "python_function", None) or getattr(thing, "__wrapped__", None)
