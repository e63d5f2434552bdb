"""Cloudpickle, for functions and objects that are sent to other processes of the job, which may have some already."""

from __future__ import annotations
import __future__

import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle

from phalanx.errors import PhalanxError, UnsupportedError

Refer = Callable[[Any], Any]
"""Returns the reference that travels in a thing's place; None if it travels by value."""
Reduce = Callable[[Any], Any]
"""Returns how a thing is taken apart, as `__reduce_ex__` says it; NotImplemented for what pickle knows."""

_LAZY = __future__.annotations


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles modules by name, whatever their class, and keeps what AutoGraph needs of functions.

    Cloudpickle treats a module of a custom class, such as `torch.ops`, as an object, and fails. A function refers to
    that module if it uses `torch` and, for example, `keras.ops`: cloudpickle looks at the names alone.

    Since 3.1.3 it drops the file name of code. Tracebacks would lack their source lines, and
    AutoGraph, which reads the source of a `tf.function`, could not convert its `if` and `for`.

    It sends the globals that code uses, which are not those that only annotations name. AutoGraph would evaluate them
    again, unless it finds among the globals that the module has asked for annotations without values (PEP 563).
    """

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, types.CodeType):
            _, args = self.dispatch_table[types.CodeType](thing)
            return _code, (thing.co_filename, args)
        if isinstance(thing, types.ModuleType) and type(thing) is not types.ModuleType:
            name = getattr(thing, "__name__", "")
            if sys.modules.get(name) is thing:
                return importlib.import_module, (name,)
        reduced = super().reducer_override(thing)
        if isinstance(thing, types.FunctionType) and reduced is not NotImplemented:  # it is taken apart
            _, sent = reduced[2]
            if thing.__globals__.get("annotations", _LAZY) is _LAZY:
                sent["__globals__"]["annotations"] = _LAZY
        return reduced


def _code(filename: str, args: tuple[Any, ...]) -> types.CodeType:
    return types.CodeType(*args).replace(co_filename=filename)


class _ReferencePickler(Pickler):
    def __init__(self, file: io.BytesIO, refer: Refer, reduce: Reduce) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._refer = refer
        self._reduce = reduce

    def persistent_id(self, thing: Any) -> Any:
        return self._refer(thing)

    def reducer_override(self, thing: Any) -> Any:
        reduced = self._reduce(thing)
        return super().reducer_override(thing) if reduced is NotImplemented else reduced


class _ReferenceUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, load: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._load = load

    def persistent_load(self, reference: Any) -> Any:
        return self._load(reference)


def dumps_referring(thing: Any, refer: Refer, reduce: Reduce) -> bytes:
    """The pickle of a thing. Raises: whatever the pickling code of some class raises."""
    file = io.BytesIO()
    _ReferencePickler(file, refer, reduce).dump(thing)
    return file.getvalue()


def loads_referring(data: bytes | memoryview, load: Callable[[Any], Any]) -> Any:
    """Unpickle; `load` returns the object here that a reference refers to."""
    return _ReferenceUnpickler(io.BytesIO(data), load).load()


@contextmanager
def refusing(refusal: str, alternative: str) -> Iterator[None]:
    """Around pickling: whatever it raises is an error that says what to do.

    Args:
        refusal: says what cannot travel, and where to; the reason follows it.
        alternative: a sentence, for errors of pickling code, which say nothing of it.

    Raises: UnsupportedError, or a PhalanxError of the class that was raised.
    """
    try:
        yield
    except PhalanxError as error:
        raise type(error)(f"{refusal}: {error}") from error
    except Exception as error:  # whatever the pickling code of some class raises
        raise UnsupportedError(f"{refusal}: {str(error).rstrip('.')}. {alternative}") from error


def dumps(thing: Any) -> bytes:
    """Like `cloudpickle.dumps`."""
    file = io.BytesIO()
    Pickler(file).dump(thing)
    return file.getvalue()
