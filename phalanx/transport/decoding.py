"""Decodes bytes from another process or a file to typed values; only `transport.serialization` does so as well.

Any defect of the bytes is a FrameError. `msgspec` raises three kinds of errors: those for text that is not UTF-8 and
for values that are nested too deeply are Python's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import msgspec

from phalanx.errors import FrameError

T = TypeVar("T")
Content = bytes | bytearray | memoryview

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Errors that `msgspec` raises for bytes that it cannot decode."""


class Decoder(Generic[T]):
    """Reads values of one type.

    Args:
        kind: Type of the values; msgspec checks every part of a value against it.
        json: Whether the bytes are JSON; otherwise, they are MessagePack.
    """

    @overload
    def __init__(self: Decoder[T], kind: type[T], *, json: bool = False): ...

    @overload
    def __init__(self: Decoder[Any], kind: Any, *, json: bool = False): ...

    def __init__(self, kind: Any, *, json: bool = False):
        decoder = msgspec.json.Decoder(kind) if json else msgspec.msgpack.Decoder(kind)
        self._decode: Callable[[Content], T] = decoder.decode

    def decode(self, content: Content) -> T:
        """Decode bytes. Raises: FrameError if they are not a value of this type."""
        try:
            return self._decode(content)
        except DECODE_ERRORS as error:
            raise FrameError(
                f"the message cannot be read ({error}): it is damaged, or its sender runs another version of Phalanx"
            ) from error


@overload
def decode_message(content: Content, kind: type[T]) -> T: ...


@overload
def decode_message(content: Content, kind: Any = ...) -> Any: ...


def decode_message(content: Content, kind: Any = Any) -> Any:
    """Decode MessagePack bytes to a value of this type. Raises: FrameError."""
    return Decoder(kind).decode(content)


@overload
def decode_json(content: Content, kind: type[T]) -> T: ...


@overload
def decode_json(content: Content, kind: Any) -> Any: ...


def decode_json(content: Content, kind: Any) -> Any:
    """Decode JSON bytes to a value of this type. Raises: FrameError."""
    return Decoder(kind, json=True).decode(content)
