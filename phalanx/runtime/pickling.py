"""Cloudpickle, for functions that are sent to other processes of the job."""

from __future__ import annotations

import importlib
import io
import sys
import types
from typing import Any

import cloudpickle


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles modules by name, whatever their class, and keeps the file name of code.

    Cloudpickle treats a module of a custom class, such as `torch.ops`, as an object, and fails. A function refers to
    that module if it uses `torch` and, for example, `keras.ops`: cloudpickle looks at the names alone.

    Since 3.1.3 it drops the file name of code. Tracebacks would lack their source lines, and
    AutoGraph, which reads the source of a `tf.function`, could not convert its `if` and `for`.
    """

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, types.CodeType):
            _, args = self.dispatch_table[types.CodeType](thing)
            return _code, (thing.co_filename, args)
        if isinstance(thing, types.ModuleType) and type(thing) is not types.ModuleType:
            name = getattr(thing, "__name__", "")
            if sys.modules.get(name) is thing:
                return importlib.import_module, (name,)
        return super().reducer_override(thing)


def _code(filename: str, args: tuple[Any, ...]) -> types.CodeType:
    return types.CodeType(*args).replace(co_filename=filename)


def dumps(thing: Any) -> bytes:
    """Like `cloudpickle.dumps`."""
    file = io.BytesIO()
    Pickler(file).dump(thing)
    return file.getvalue()
