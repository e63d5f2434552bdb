"""Bytes of another process or a file become values of a type, here and in `transport.serialization` only.

Whatever is wrong with the bytes is a FrameError. `msgspec` itself raises errors of three families: for text that is not
UTF-8 and for values nested too deeply they are not its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import msgspec

from phalanx.errors import FrameError

T = TypeVar("T")
Content = bytes | bytearray | memoryview

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What `msgspec` raises for bytes that it cannot read."""


class Decoder(Generic[T]):
    """Reads values of one type.

    Args:
        kind: the type; msgspec checks every part of a value against it.
        json: whether they are JSON; otherwise MessagePack.
    """

    @overload
    def __init__(self: Decoder[T], kind: type[T], *, json: bool = False): ...

    @overload
    def __init__(self: Decoder[Any], kind: Any, *, json: bool = False): ...

    def __init__(self, kind: Any, *, json: bool = False):
        decoder = msgspec.json.Decoder(kind) if json else msgspec.msgpack.Decoder(kind)
        self._decode: Callable[[Content], T] = decoder.decode

    def decode(self, content: Content) -> T:
        """Raises: FrameError if the bytes are not a value of this type."""
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
    """The value of this type in these bytes of MessagePack. Raises: FrameError."""
    return Decoder(kind).decode(content)


@overload
def decode_json(content: Content, kind: type[T]) -> T: ...


@overload
def decode_json(content: Content, kind: Any) -> Any: ...


def decode_json(content: Content, kind: Any) -> Any:
    """The value of this type in these bytes of JSON. Raises: FrameError."""
    return Decoder(kind, json=True).decode(content)
