"""The worker's side of `phalanx.launch`: call a function that came pickled, and pickle what it returns.

Pickles pass only between a launcher and the workers it started itself, through files without a name that no
other process can open; never over the network.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.runtime import exit_codes
from phalanx.runtime.pickling import dumps


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
    # The path comes first and on its own: functions of modules are pickled by name and found through it.
    return pickle.dumps((list(sys.path), dumps(call)))


def decode_result(content: bytes) -> CallReturned | CallRaised:
    result = pickle.loads(content)
    assert isinstance(result, (CallReturned, CallRaised)), result
    return result


def run(function_fd: int, result_fd: int, record: Callable[[BaseException], object]) -> int:
    """Do the call; returns the exit code. The traceback is not printed: the launcher raises the error.

    Args:
        record: is told the error of the function.
    """
    try:
        with os.fdopen(function_fd, "rb") as file:
            path, pickled = pickle.load(file)
        sys.path[:] = path
        call: PickledCall = pickle.loads(pickled)
        result: CallReturned | CallRaised = CallReturned(call.function(*call.args, **call.kwargs))
        content = dumps(result)
        code = 0
    except Exception as error:
        record(error)
        content = encode_error(error)
        code = exit_codes.of_error(error)
    with os.fdopen(result_fd, "wb") as file:
        file.write(content)
    return code


def encode_error(error: BaseException) -> bytes:
    """The pickle of a `CallRaised`; of a stand-in with the same words, if the error itself cannot travel."""
    text = "".join(traceback.format_exception(error))
    try:
        content: bytes = dumps(CallRaised(error.with_traceback(None), text))
        pickle.loads(content)  # an error whose __init__ wants other arguments pickles well and unpickles badly
    except Exception:
        # Any error may come from a class's own pickling code; the original's text is not lost by it.
        content = dumps(CallRaised(stand_in(type(error).__name__, exit_codes.message(error)), text))
    return content


def stand_in(kind: str, message: str) -> RuntimeError:
    """For an error that cannot travel."""
    return RuntimeError(f"{kind}: {message}")
