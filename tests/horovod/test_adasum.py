"""Adasum against the formula of its paper, computed plainly."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.cluster.membership import Membership
from phalanx.collectives import connect
from phalanx.horovod.adasum import adasum, combine
from tests.support.processes import run_ranks, values

SHAPES = ((1000,), (3, 5), (), (0,), (257,))


def brought(rank: int, dtype: str) -> list[np.ndarray]:
    generator = np.random.default_rng((rank, 3))
    arrays = [generator.normal(size=shape).astype(dtype) for shape in SHAPES]
    if rank == 1:
        arrays[1][:] = 0  # a gradient of zeros beside others
    return arrays


def plain(arrays: list[np.ndarray]) -> np.ndarray:
    """Neighbours are merged, then the results."""
    if len(arrays) == 1:
        return arrays[0]
    merged = []
    for a, b in zip(arrays[::2], arrays[1::2], strict=True):
        dot, of_a, of_b = (float(np.sum(x * y)) for x, y in ((a, b), (a, a), (b, b)))
        merged.append((1 - dot / (2 * of_a) if of_a else 1) * a + (1 - dot / (2 * of_b) if of_b else 1) * b)
    return plain(merged)


@pytest.mark.parametrize(("size", "dtype", "rtol"), [(2, "float64", 1e-12), (4, "float32", 1e-5), (4, "float16", 2e-3)])
def test_adasum_is_that_of_the_paper(size: int, dtype: str, rtol: float) -> None:
    def body(membership: Membership) -> list[np.ndarray]:
        with connect(membership) as communicator:
            arrays = brought(membership.rank, dtype)
            adasum(communicator, arrays, arrays)
            return arrays

    results = values(run_ranks(body, size))
    for index in range(len(SHAPES)):
        expected = plain([brought(rank, dtype)[index].astype(np.float64) for rank in range(size)])
        for merged in results:
            np.testing.assert_allclose(merged[index].astype(np.float64), expected, rtol=rtol, atol=rtol)
            np.testing.assert_array_equal(merged[index], results[0][index])


def test_a_gradient_that_nearly_vanishes_beside_the_other() -> None:
    tiny, large = np.full(4, 1e-40, np.float32), np.ones(4, np.float32)
    for left, right in ((tiny, large), (large, tiny)):
        dots = [np.dot(a.astype(np.float64), b) for a, b in ((left, right), (left, left), (right, right))]
        combined = combine(left, right, np.array(dots))
        assert combined.dtype == np.float32
        np.testing.assert_allclose(combined, 0.5, rtol=1e-6)  # the mean, since they are parallel
