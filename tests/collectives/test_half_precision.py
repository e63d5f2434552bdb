"""Half precision and back: NumPy's results, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phalanx.collectives.half_precision import PIECE, from_half, to_half

ALL = np.arange(2**16, dtype=np.uint16).view(np.float16)


def same(found: Any, expected: Any, bits: type) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(found[~is_nan].view(bits), expected[~is_nan].view(bits))


def test_every_half_is_widened_exactly() -> None:
    same(from_half(ALL), ALL.astype(np.float32), np.uint32)


def test_every_half_and_what_lies_between_two_is_rounded_as_by_numpy() -> None:
    finite = np.sort(ALL[np.isfinite(ALL)].astype(np.float32))
    between = (finite[:-1] + finite[1:]) / 2
    borders = [np.nextafter(between, np.float32(way)) for way in (-np.inf, np.inf)]
    others = np.array([65519.99, 65520, -65520, 1e38, np.inf, -np.inf, np.nan, 1e-45, -0.0], np.float32)
    values = np.concatenate([ALL.astype(np.float32), finite, between, *borders, others])
    with np.errstate(all="ignore"):
        same(to_half(values), values.astype(np.float16), np.uint16)


def test_any_bits_are_rounded_as_by_numpy() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        same(to_half(values), values.astype(np.float16), np.uint16)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (PIECE + 1,)])
def test_shapes_stay(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    same(np.asarray(to_half(values)), np.asarray(values.astype(np.float16)), np.uint16)
    halves = np.asarray(values.astype(np.float16))
    same(from_half(halves), np.asarray(halves.astype(np.float32)), np.uint32)


def test_threads_that_take_subnormal_numbers_for_zero() -> None:
    torch = pytest.importorskip("torch")
    finite = ALL[np.isfinite(ALL)]
    expected = finite.astype(np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        widened, rounded = from_half(finite), to_half(expected)
    finally:
        torch.set_flush_denormal(False)
    same(widened, expected, np.uint32)
    same(rounded, finite, np.uint16)


def test_other_orders_in_memory() -> None:
    values = np.random.default_rng(2).normal(size=(8, 6)).astype(np.float32).T
    same(to_half(values), values.astype(np.float16), np.uint16)
