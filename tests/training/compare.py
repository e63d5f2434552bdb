"""Compares findings, and names the place where they differ."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_close(actual: Any, expected: Any, tolerance: float, place: str = "") -> None:
    """Compare nested dicts and lists of numbers, arrays and strings.

    Args:
        tolerance: Relative and absolute tolerance.

    Raises: AssertionError that names the place.
    """
    if isinstance(expected, dict):
        assert isinstance(actual, dict), f"{place}: {type(actual).__name__} instead of a dict"
        assert list(actual) == list(expected), f"{place}: keys {list(actual)} instead of {list(expected)}"
        for key in expected:
            assert_close(actual[key], expected[key], tolerance, f"{place}.{key}" if place else str(key))
    elif isinstance(expected, list):
        assert isinstance(actual, list), f"{place}: {type(actual).__name__} instead of a list"
        assert len(actual) == len(expected), f"{place}: {len(actual)} entries instead of {len(expected)}"
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_close(left, right, tolerance, f"{place}[{index}]")
    elif isinstance(expected, str) or expected is None:
        assert actual == expected, f"{place}: {actual!r} instead of {expected!r}"
    else:
        np.testing.assert_allclose(
            np.asarray(actual, np.float64),
            np.asarray(expected, np.float64),
            rtol=tolerance,
            atol=tolerance,
            err_msg=place,
        )
