"""Pickles functions and objects for other processes of the job, which may already have some, with cloudpickle."""

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

ToReference = Callable[[Any], Any]
"""Returns the reference that is pickled instead of a value; None to pickle it by value."""
Reducer = Callable[[Any], Any]
"""Returns the reduced form of a value, as `__reduce_ex__` does; NotImplemented to leave it to pickle."""

_LAZY = __future__.annotations


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles modules by name, whatever their class, and keeps the parts of functions that AutoGraph needs.

    Cloudpickle treats a module of a custom class, such as `torch.ops`, as an object, and fails. A function refers to
    that module if it uses `torch` and, for example, `keras.ops`, because cloudpickle only compares names.

    Since 3.1.3, cloudpickle drops the file name of code. Tracebacks would lack their source lines, and AutoGraph, which
    reads the source of a `tf.function`, could not convert its `if` and `for`.

    Cloudpickle sends the globals that code uses, but not those that only annotations use. AutoGraph would evaluate the
    annotations again, unless the globals show that the module has postponed their evaluation (PEP 563).
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            _, args = self.dispatch_table[types.CodeType](value)
            return _code, (value.co_filename, args)
        if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
            name = getattr(value, "__name__", "")
            if sys.modules.get(name) is value:
                return importlib.import_module, (name,)
        reduced = super().reducer_override(value)
        if isinstance(value, types.FunctionType) and reduced is not NotImplemented:  # pickled by value
            _, sent = reduced[2]
            if value.__globals__.get("annotations", _LAZY) is _LAZY:
                sent["__globals__"]["annotations"] = _LAZY
        return reduced


def _code(filename: str, args: tuple[Any, ...]) -> types.CodeType:
    return types.CodeType(*args).replace(co_filename=filename)


class _ReferencePickler(Pickler):
    def __init__(self, file: io.BytesIO, to_reference: ToReference, reducer: Reducer) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._to_reference = to_reference
        self._reducer = reducer

    def persistent_id(self, value: Any) -> Any:
        return self._to_reference(value)

    def reducer_override(self, value: Any) -> Any:
        reduced = self._reducer(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


class _ReferenceUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, load: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._load = load

    def persistent_load(self, reference: Any) -> Any:
        return self._load(reference)


def dumps_with_references(value: Any, to_reference: ToReference, reducer: Reducer) -> bytes:
    """Pickle a value. Raises: whatever the pickling code of some class raises."""
    file = io.BytesIO()
    _ReferencePickler(file, to_reference, reducer).dump(value)
    return file.getvalue()


def loads_with_references(data: bytes | memoryview, load: Callable[[Any], Any]) -> Any:
    """Unpickle; `load` returns the local object for a reference."""
    return _ReferenceUnpickler(io.BytesIO(data), load).load()


@contextmanager
def explain_pickling_errors(refusal: str, alternative: str) -> Iterator[None]:
    """Convert errors raised by pickling into errors that say what to do instead.

    Args:
        refusal: Names the value that cannot be sent, and its destination; the reason is appended.
        alternative: A sentence that is added to errors of pickling code, which suggest no alternative.

    Raises: UnsupportedError, or a PhalanxError of the class that was raised.
    """
    try:
        yield
    except PhalanxError as error:
        raise type(error)(f"{refusal}: {error}") from error
    except Exception as error:  # whatever the pickling code of some class raises
        raise UnsupportedError(f"{refusal}: {str(error).rstrip('.')}. {alternative}") from error


def dumps(value: Any) -> bytes:
    """Like `cloudpickle.dumps`."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
