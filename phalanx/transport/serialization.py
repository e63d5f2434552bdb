"""Serializes values with MessagePack: numbers, strings, NumPy arrays, and lists, tuples, dictionaries, sets and deques
of them."""

from __future__ import annotations

import math
import reprlib
from collections import deque
from typing import Any

import msgspec
import numpy as np

from phalanx.errors import FrameError

_ARRAY, _TUPLE, _SET, _DEQUE = "\0array", "\0tuple", "\0set", "\0deque"
_PAIRS = "\0pairs"
"""Marks a dictionary with keys other than strings."""
INTEGERS = (-(2**63), 2**64 - 1)
"""The range of MessagePack's integers."""
MAX_DTYPE_CHARACTERS = 40


def is_serializable(value: Any) -> bool:
    """Whether `encode` accepts the value."""
    if isinstance(value, (list, tuple, set, deque)):
        return all(map(is_serializable, value))
    if isinstance(value, dict):
        return all(map(is_serializable, (*value, *value.values())))
    if isinstance(value, np.ndarray):
        if value.dtype == object:  # strings, as used by lookup layers
            return all(isinstance(item, str | bytes) and is_serializable(item) for item in value.flat)
        return not value.dtype.hasobject and value.dtype.names is None and value.dtype.subdtype is None
    if isinstance(value, np.generic):
        value = value.item()  # some, such as dates, have no Python number and stay unchanged
    if isinstance(value, int):
        return INTEGERS[0] <= value <= INTEGERS[1]
    if isinstance(value, str):
        return _is_text(value)
    return isinstance(value, (type(None), float, bytes))


def _is_text(value: str) -> bool:
    """Whether a string can be encoded as UTF-8; some paths cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode(value: Any) -> bytes:
    """Encode a value. Raises: TypeError unless it is serializable. MessagePack would accept more types, such as dates,
    but decode them as something else."""
    if not is_serializable(value):
        raise TypeError(f"{reprlib.repr(value)} of {type(value)} has parts that do not travel between processes")
    return msgspec.msgpack.encode(_pack(value))


def decode(content: bytes) -> Any:
    """Decode a value, with Python numbers instead of NumPy scalars.

    Raises: FrameError for bytes that `encode` does not return. Sizes that they claim never allocate more memory than
        the bytes themselves.
    """
    try:
        return _unpack(msgspec.msgpack.decode(content))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError, SyntaxError) as error:
        raise FrameError(f"These bytes are not an encoded value: {error}") from error


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        content = value.reshape(-1).tolist() if value.dtype.hasobject else value.tobytes()
        return {_ARRAY: [_name(value.dtype), list(value.shape), content]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item) for item in value]}
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, set):
        return {_SET: [_pack(item) for item in value]}
    if isinstance(value, deque):
        return {_DEQUE: [value.maxlen, [_pack(item) for item in value]]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {str.__str__(key): _pack(item) for key, item in value.items()}
        return {_PAIRS: [[_pack(key), _pack(item)] for key, item in value.items()]}
    # Subclasses defined by the program, such as strings with methods, which msgspec does not accept.
    if isinstance(value, str):
        return str.__str__(value)
    kinds: tuple[Any, ...] = (bool, int, float, bytes)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), None)


def _name(dtype: np.dtype[Any]) -> str:
    """Name of a dtype that keeps byte order, string length and time unit. The dtypes of `ml_dtypes` have only names:
    their `dtype.str` is void."""
    return dtype.name if dtype.kind == "V" or dtype.hasobject else dtype.str


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return _array(*value[_ARRAY])
    if _TUPLE in value:
        return tuple([_unpack(item) for item in value[_TUPLE]])
    if _SET in value:
        return {_unpack(item) for item in value[_SET]}
    if _DEQUE in value:
        longest, items = value[_DEQUE]
        return deque((_unpack(item) for item in items), longest)
    if _PAIRS in value:
        return {_unpack(key): _unpack(item) for key, item in value[_PAIRS]}
    return {key: _unpack(item) for key, item in value.items()}


def _array(name: str, shape: list[int], content: bytes | list[Any]) -> np.ndarray[Any, Any]:
    """Raises: TypeError, ValueError."""
    if isinstance(content, list):  # an array of Python objects
        objects = np.empty(len(content), object)
        objects[:] = content
        return objects.reshape(shape)
    dtype = _number_type(name)
    if not isinstance(content, bytes) or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes are not an array of shape {shape} and dtype {dtype}")
    return np.ndarray(shape, dtype, bytearray(content))  # a copy, because an array of `bytes` cannot be written to


def _number_type(name: str) -> np.dtype[Any]:
    """Return the dtype with this name. Rejects Python objects, whose bytes would be used as memory addresses."""
    if len(name) > MAX_DTYPE_CHARACTERS:
        raise ValueError("the name of a dtype is too long")
    dtype = np.dtype(name)
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None or not dtype.itemsize:
        raise ValueError(f"arrays of dtype {dtype} are not encoded")
    return dtype
