"""Detects whether a function, with everything that it refers to, has changed since it was pickled.

Pickling a function of the main program takes milliseconds, and a program schedules the same function repeatedly. The
comparison covers its code, the values of its closure, its defaults and the globals that it names, and the same for the
functions and classes among these. Mutable objects are compared by their pickles, which are usually small. Objects that
are sent as references, or assumed to be constant, are compared by identity.
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
"""The objects found, in order: whether each is compared by identity, and the object."""


def trace_references(function: Any, is_constant: Callable[[Any], bool], pickled: Callable[[Any], bytes]) -> Trace:
    """The objects that a function refers to.

    Args:
        is_constant: Returns whether an object is sent as a reference, or assumed to be constant.
        pickled: Returns the pickle of any other object.
    """
    found: Trace = []  # keeps what it compares by identity alive, so that no other object gets its id
    seen: set[int] = set()
    pending = [function]
    while pending:
        thing = pending.pop()
        if isinstance(thing, _BY_VALUE):
            found.append((False, (type(thing), thing)))
            continue
        if id(thing) in seen:  # functions may refer to each other
            found.append((True, thing))
            continue
        seen.add(id(thing))
        if isinstance(thing, type) and _is_pickled_by_value(thing):
            found.append((True, thing))
            pending += [*thing.__bases__, *_members(thing)]
        elif isinstance(thing, _BY_IDENTITY) or is_constant(thing):
            found.append((True, thing))
        elif isinstance(thing, property):
            pending += [thing.fget, thing.fset, thing.fdel]
        elif isinstance(thing, FunctionType):
            found.append((True, thing))
            found.append((True, thing.__code__))
            pending.extend(_parts(thing))
        elif isinstance(thing, MethodType):
            pending += [thing.__func__, thing.__self__]
        elif isinstance(thing, functools.partial):
            pending += [thing.func, thing.args, *thing.keywords, *thing.keywords.values()]
        elif isinstance(thing, weakref.ref):  # TensorFlow binds its compiled methods this way
            pending.append(thing())
        elif type(thing) is tuple:
            found.append((False, len(thing)))
            pending.extend(thing)
        elif isinstance(inner := _wrapped(thing), FunctionType):
            found.append((True, thing))
            pending.append(inner)
        else:
            found.append((False, pickled(thing)))
    return found


def traces_equal(one: Trace, other: Trace) -> bool:
    """Whether two traces contain the same objects."""
    return len(one) == len(other) and all(
        by_identity == again and (left is right if by_identity else left == right)
        for (by_identity, left), (again, right) in zip(one, other, strict=True)
    )


def _parts(function: FunctionType) -> Iterator[Any]:
    if not _is_pickled_by_value(function):
        return  # it is sent by name
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


def _is_pickled_by_value(thing: Any) -> bool:
    """Whether cloudpickle sends the code of a function or class, instead of the name by which it is imported."""
    return thing.__module__ == "__main__" or "<locals>" in thing.__qualname__


def _members(cls: type) -> Iterator[Any]:
    """The members of a class, except those that Python itself adds."""
    for name, member in vars(cls).items():
        if not isinstance(member, GetSetDescriptorType | MemberDescriptorType) and not name.startswith("_abc_"):
            yield name
            yield member


def _names(code: CodeType) -> set[str]:
    """The globals that code may use, including those of functions inside it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _wrapped(thing: Any) -> Any:
    """The Python function of a function that a backend has compiled."""
    return getattr(thing, "python_function", None) or getattr(thing, "__wrapped__", None)
