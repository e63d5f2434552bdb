"""Compares what two runs of a program have yielded. Scripts of findings contain these two functions as they are."""

from __future__ import annotations

from typing import Any

import numpy as np


def flatten(value: Any, place: str = "") -> dict[str, Any]:
    """Nested dicts and sequences as one dict from places to arrays and texts. The order of keys is a text, too."""
    if isinstance(value, dict):
        flat = {f"{place} keys": ", ".join(map(str, value))}
        for key, item in value.items():
            flat |= flatten(item, f"{place} {key}")
        return flat
    if isinstance(value, list | tuple):
        flat = {f"{place} length": str(len(value))}
        for index, item in enumerate(value):
            flat |= flatten(item, f"{place}[{index}]")
        return flat
    return {place: value if isinstance(value, str) or value is None else np.asarray(value, "float64")}


def differences(actual: Any, expected: Any, tolerance: float, noise: Any = ()) -> list[str]:
    """Where two flattened values differ by more than `tolerance` of an array's largest value.

    Args:
        noise: flattened values of runs that rounding alone has driven from `expected`.
    """
    found = [f"{place}: missing" for place in expected if place not in actual]
    for place, left in actual.items():
        right = expected.get(place)
        if place not in expected:
            found.append(f"{place}: not expected")
        elif left is None or isinstance(left, str) or right is None or isinstance(right, str):
            if not (type(left) is type(right) and left == right):
                found.append(f"{place}: {left!r} instead of {right!r}")
        elif left.shape != right.shape:
            found.append(f"{place}: shape {left.shape} instead of {right.shape}")
        elif left.size:
            finite = right[np.isfinite(right)]
            scale = np.abs(finite).max() if finite.size else 0.0
            allowed = tolerance * (scale + 0.1)
            for other in noise:
                if place in other and getattr(other[place], "shape", None) == right.shape:
                    allowed = allowed + 30 * _distance(other[place], right).max()
            if "r2_score" in place:  # of targets that are all alike: divided by what rounding leaves of their variance
                left = np.where(np.abs(left) > 1e5, right, left)
            one_is_nan = np.isnan(left) != np.isnan(right)
            same = (_distance(left, right) <= allowed) & ~one_is_nan
            if not same.all():
                weight = np.where(one_is_nan, np.inf, _distance(left, right))
                worst = np.unravel_index(np.argmax(np.where(same, 0.0, weight)), left.shape)
                found.append(f"{place}: {left[worst]:.9g} instead of {right[worst]:.9g}")
    return found


def _distance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """0 where both are equal, infinities too, or where one is NaN."""
    with np.errstate(invalid="ignore"):
        distance = np.where(left == right, 0.0, np.abs(left - right))
    return np.where(np.isnan(distance), 0.0, distance)
