"""Addresses of host names, within a bound. The C library has none: it waits for a name server that does not answer."""

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
"""Long enough for a first name server that does not answer and a second one that does."""


def resolve(address: Address, within_s: float | None = None) -> list[Any]:
    """What `socket.getaddrinfo` returns for an address.

    Raises: OSError, UnicodeError as `getaddrinfo`; TimeoutError.
    """
    if address.is_ip:
        return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return look_up(lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM), within_s)


def look_up(function: Callable[[], T], within_s: float | None = None) -> T:
    """The result of a function that may ask a name server, in a thread: it cannot be interrupted.

    Raises: what the function raises; TimeoutError after so many seconds, `RESOLVE_S` by default.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    # A daemon, because it may wait long after its result is of use, and must not keep the process alive.
    threading.Thread(target=run, name="phalanx-name-resolution", daemon=True).start()
    try:
        return found.result(RESOLVE_S if within_s is None else within_s)
    except TimeoutError as error:
        raise TimeoutError(errno.ETIMEDOUT, "no name server answers") from error
