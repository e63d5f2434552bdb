"""Conversion between float32 and float16 with NumPy's exact results, without NumPy's slow cases.

NumPy 2.4 converts a value that is subnormal in float16 (below 6e-5, as most gradients are) through a floating-point
exception. Measured on one core of a Xeon (Sapphire Rapids) for 2^20 values, in milliseconds:

    values around    to float16: NumPy   here    to float32: NumPy   here
    1                            2.5     2.7                 1.4     1.2
    1e-3                        11       8                   2.6     1.2
    1e-5                       250       3                  28       1.2

Narrowing moves the bits of many values at once; widening looks each value up in a table of 256 KiB, which fits into the
L2 cache. NaN payloads are not preserved. bfloat16 needs no replacement: ml_dtypes takes 0.6 ms and 0.3 ms.

No arithmetic touches a subnormal float32, because TensorFlow's threads flush those to zero.

Source: Giesen 2016, float_to_half_fast3_rtne.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_U = np.uint32

PIECE = 16_384
"""Values that are converted at once. They and the temporaries stay in the L1 and L2 caches."""
_SIGN, _INFINITE, _QUIET_NAN = _U(0x8000), _U(0x7C00), _U(0x7E00)
_DROPPED_BITS = _U(13)
"""Difference in bits between the fractions of float32 and float16."""
_SMALLEST_NORMAL, _TOO_LARGE, _INFINITE_32 = _U(113 << 23), _U(143 << 23), _U(255 << 23)
_NORMAL = _U((15 - 127 << 23 & 0xFFFFFFFF) + 0xFFF)
"""Rebases the exponent, and adds half of the dropped part minus one."""
_SUBNORMAL = _U((127 - 15) + (23 - 10) + 1 << 23)
"""A float32 whose sum with a magnitude that is subnormal in float16 has the rounded fraction in its lowest bits."""
_WIDENED = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""Table from the bits of each float16 to its value as float32."""


def to_half(values: Array) -> Array:
    """Convert float32 values of any shape to float16, rounding to nearest even. Values from 65520 become infinite."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    result = np.empty(flat.size, np.uint16)
    for start in range(0, flat.size, PIECE):
        piece = slice(start, start + PIECE)
        result[piece] = _half_bits(flat[piece])
    return result.view(np.float16).reshape(values.shape)


def from_half(values: Array) -> Array:
    """Convert float16 values of any shape to float32."""
    return _WIDENED.take(np.ascontiguousarray(values).view(np.uint16), mode="clip").reshape(values.shape)


def _half_bits(values: Array) -> Array:
    bits = values.view(_U)
    magnitude = bits & _U(0x7FFFFFFF)
    result = magnitude >> _DROPPED_BITS
    result &= _U(1)  # a tie rounds to the even neighbor
    result += magnitude
    result += _NORMAL  # modulo 2**32; values that are too small or too large for this formula are replaced below
    result >>= _DROPPED_BITS
    subnormal = (magnitude.view(np.float32) + _SUBNORMAL.view(np.float32)).view(_U)
    subnormal -= _SUBNORMAL
    np.copyto(result, subnormal, where=magnitude < _SMALLEST_NORMAL)
    large = magnitude >= _TOO_LARGE
    if large.any():
        result[large] = np.where(magnitude[large] > _INFINITE_32, _QUIET_NAN, _INFINITE)
    bits = bits >> _U(16)  # moves the sign from its float32 position to its float16 position
    bits &= _SIGN
    result |= bits
    return result
