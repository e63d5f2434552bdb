"""The worker's side of `phalanx.launch`: calls a pickled function and pickles its result.

Pickles pass only between a launcher and the workers that it started, through files without a name that no other process
can open, and never over the network.
"""

from __future__ import annotations

import linecache
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.runtime import exit_codes
from phalanx.runtime.pickling import dumps

logger = logging.getLogger(__name__)


class PickledCall(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CallReturned(NamedTuple):
    value: Any


class CallRaised(NamedTuple):
    error: BaseException
    traceback: str


def encode(call: PickledCall) -> bytes:
    # The path is separate and first, because functions in modules are pickled by name and found through it.
    return pickle.dumps((list(sys.path), _sources_without_files(), dumps(call)))


def _sources_without_files() -> dict[str, list[str]]:
    """Source lines of code that is in no file, such as a notebook's cells; for tracebacks and AutoGraph."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return {name: entry[2] for name, entry in entries.items() if not os.path.exists(name)}


def decode_result(content: bytes) -> CallReturned | CallRaised:
    result = pickle.loads(content)
    assert isinstance(result, (CallReturned, CallRaised)), result
    return result


def run(function_fd: int, result_fd: int, record: Callable[[BaseException], object]) -> int:
    """Call the function and return the exit code. No traceback is printed, because the launcher raises the error.

    Args:
        function_fd, result_fd: Descriptors of the files for the call and its result.
        record: Receives the error of the function.
    """
    try:
        with os.fdopen(function_fd, "rb") as file:
            path, sources, pickled = pickle.load(file)
        sys.path[:] = path
        for name, lines in sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        call: PickledCall = pickle.loads(pickled)
        result: CallReturned | CallRaised = CallReturned(call.function(*call.args, **call.kwargs))
        content = dumps(result)
        code = 0
    except Exception as error:
        record(error)
        content = encode_error(error)
        code = exit_codes.code_for_error(error)
    with os.fdopen(result_fd, "wb") as file:
        file.write(content)
    return code


def encode_error(error: BaseException) -> bytes:
    """Pickle a `CallRaised`, with a `RuntimeError` of the same text if the error cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    error = error.with_traceback(None)
    for content in (error, _PickledWithoutInit(error)):
        try:
            pickled: bytes = dumps(CallRaised(content, text))  # type: ignore[arg-type]
            pickle.loads(pickled)  # an error whose __init__ has other arguments pickles but does not unpickle
        except Exception as reason:  # any error, from the class's pickling code
            logger.debug("%r cannot be pickled: %r", content, reason)
        else:
            return pickled
    return dumps(CallRaised(replacement_error(type(error).__name__, exit_codes.message(error)), text))


class _PickledWithoutInit:
    """Replaces an error in a pickle, so that unpickling does not call its `__init__`: an error keeps only the arguments
    of `Exception.__init__`, which may not fit."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self._error), self._error.args, dict(self._error.__dict__))


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def replacement_error(kind: str, message: str) -> RuntimeError:
    """Build a replacement for an error that cannot be pickled."""
    return RuntimeError(f"{kind}: {message}")
