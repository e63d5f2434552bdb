"""Half precision and back, a hundred times faster than NumPy where it matters.

NumPy converts each value by itself, and what is subnormal in 16 bits (below 6e-5, as most gradients are) by way of a
floating-point exception. Here the bits of many values are moved at once. Every result is NumPy's, to the bit; of NaN
one form remains. No subnormal float32 is computed with: TensorFlow's threads take those for zero.

Method: Giesen 2016, float_to_half_fast3_rtne and half_to_float_fast4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_U = np.uint32

PIECE = 16_384
"""Values that are converted at once: they, and what is computed on the way, stay in the cache."""
_SIGN, _INFINITE, _QUIET_NAN = _U(0x8000), _U(0x7C00), _U(0x7E00)
_DROPPED_BITS = _U(13)
"""By which the fraction of 32 bits is longer than that of 16."""
_SMALLEST_NORMAL, _TOO_LARGE, _INFINITE_32 = _U(113 << 23), _U(143 << 23), _U(255 << 23)
_NORMAL = _U((15 - 127 << 23 & 0xFFFFFFFF) + 0xFFF)
"""Moves the exponent, and adds half of what is dropped, less one."""
_SUBNORMAL = _U((127 - 15) + (23 - 10) + 1 << 23)
"""As a float of 32 bits: added to a magnitude that is subnormal in 16 bits, it leaves its rounded fraction lowest."""
_EXPONENT, _SMALLEST_WIDE = _U(127 - 15 << 23), _U(1 << 23)
"""What the exponent of 32 bits is larger by; the smallest one that is not subnormal there."""
_WIDE_ZERO = _U(113 << 23).view(np.float32)


def to_half(values: Array) -> Array:
    """Float32, of any shape, as float16: to the nearest, and of two to the even one; from 65520 on infinite."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    found = np.empty(flat.size, np.uint16)
    for start in range(0, flat.size, PIECE):
        piece = slice(start, start + PIECE)
        found[piece] = _to_half(flat[piece])
    return found.view(np.float16).reshape(values.shape)


def from_half(values: Array) -> Array:
    """Float16, of any shape, as float32."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint16)
    found = np.empty(flat.size, np.float32)
    for start in range(0, flat.size, PIECE):
        piece = slice(start, start + PIECE)
        _from_half(flat[piece], found[piece])
    return found.reshape(values.shape)


def _to_half(values: Array) -> Array:
    bits = values.view(_U)
    magnitude = bits & _U(0x7FFFFFFF)
    found = magnitude >> _DROPPED_BITS
    found &= _U(1)  # of two that are as near, the even one
    found += magnitude
    found += _NORMAL
    found >>= _DROPPED_BITS
    subnormal = (magnitude.view(np.float32) + _SUBNORMAL.view(np.float32)).view(_U)
    subnormal -= _SUBNORMAL
    np.copyto(found, subnormal, where=magnitude < _SMALLEST_NORMAL)
    large = magnitude >= _TOO_LARGE
    if large.any():
        found[large] = np.where(magnitude[large] > _INFINITE_32, _QUIET_NAN, _INFINITE)
    bits = bits >> _U(16)
    bits &= _SIGN
    found |= bits
    return found


def _from_half(values: Array, found: Array) -> None:
    wide = values.astype(_U)
    bits = found.view(_U)
    np.left_shift(wide & _U(0x7FFF), _DROPPED_BITS, out=bits)
    bits += _EXPONENT
    exponent = wide & _INFINITE
    subnormal = exponent == 0
    np.add(bits, _SMALLEST_WIDE, out=bits, where=subnormal)
    np.subtract(found, _WIDE_ZERO, out=found, where=subnormal)  # has the right exponent then
    special = exponent == _INFINITE
    if special.any():
        bits[special] |= _INFINITE_32
    wide &= _SIGN
    wide <<= _U(16)
    bits |= wide
