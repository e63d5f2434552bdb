"""Resolves host names with a timeout. The C library has none: it waits for a name server that does not answer."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from phalanx.transport.address import Address

T = TypeVar("T")

RESOLVE_S = 10.0
"""Long enough for one name server that does not answer and a second one that does."""


def resolve(address: Address, within_s: float | None = None) -> list[Any]:
    """Return the result of `socket.getaddrinfo` for an address.

    Raises: OSError, UnicodeError as for `getaddrinfo`; TimeoutError.
    """
    if address.is_ip:
        return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return look_up(lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM), within_s)


def look_up(function: Callable[[], T], within_s: float | None = None) -> T:
    """Call a function that may query a name server, in a thread, because it cannot be interrupted.

    Raises: Errors of the function; TimeoutError after `within_s` seconds, `RESOLVE_S` by default.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    # A daemon thread: it may wait long after its result is useful, and must not keep the process alive.
    threading.Thread(target=run, name="phalanx-name-resolution", daemon=True).start()
    try:
        return found.result(RESOLVE_S if within_s is None else within_s)
    except TimeoutError as error:
        raise TimeoutError(errno.ETIMEDOUT, "no name server answers") from error
