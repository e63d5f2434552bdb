"""All-reduce of whatever hypothesis thinks of, on real processes, against NumPy."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.collectives import ReduceOp
from phalanx.collectives.host.host_communicator import HostCommunicator
from tests.collectives.kinds import KINDS, Kind

UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MEAN: np.add,
}
FLOATS = ["float16", "bfloat16", "float32", "float64"]
OTHERS = ["int8", "uint8", "int16", "int32", "int64", "uint64", "bool"]
NAMES = {"bfloat16": ml_dtypes.bfloat16}

shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    # Around the sizes where a chunk, a pack or a direct exchange ends.
    st.sampled_from([1023, 1024, 1025, 8191, 8192, 8193, 65_535, 65_536, 65_537, 140_000]).map(lambda n: (n,)),
)
orders = st.sampled_from(["contiguous", "transposed", "strided", "reversed"])


@st.composite
def calls(draw: st.DrawFn) -> tuple[ReduceOp, list[tuple[str, tuple[int, ...], str]], int]:
    op = draw(st.sampled_from(list(ReduceOp)))
    names = st.sampled_from(FLOATS if op is ReduceOp.MEAN else FLOATS + OTHERS)
    arrays = draw(st.lists(st.tuples(names, shapes, orders), max_size=5))
    return op, arrays, draw(st.integers(0, 2**32))


def make(spec: tuple[str, tuple[int, ...], str], seed: int, rank: int, index: int) -> np.ndarray:
    name, shape, order = spec
    generator = np.random.default_rng((seed, rank, index))
    dtype: Any = NAMES.get(name, name)
    if order == "strided" and shape:
        big = generator.uniform(0.5, 2.5, (*shape[:-1], 2 * shape[-1]))
        return big.astype(np.float32).astype(dtype)[..., ::2]
    values = np.asarray(generator.uniform(0.5, 2.5, shape)).astype(np.float32).astype(dtype)
    if order == "transposed":
        return values.T
    return values[::-1] if order == "reversed" and shape else values


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind.name in ("shared3-small-packs", "ring3", "hierarchical-uneven", "single")],
    ids=lambda kind: kind.name,
)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(calls(), min_size=1, max_size=6))
def test_all_reduce_equals_numpy(kind: Kind, plan: list[Any]) -> None:
    def body(communicator: HostCommunicator) -> list[list[np.ndarray]]:
        return [
            communicator.all_reduce(
                [make(spec, seed, communicator.rank, index) for index, spec in enumerate(specs)], op
            )
            for op, specs, seed in plan
        ]

    results = kind.run(body)
    n = kind.world_size
    for call, (op, specs, seed) in enumerate(plan):
        for index, spec in enumerate(specs):
            rows = [make(spec, seed, rank, index) for rank in range(n)]
            is_float = spec[0] in FLOATS
            wide = [row.astype(np.float64) if is_float else row for row in rows]
            exact = functools.reduce(UFUNCS[op], wide) / (n if op is ReduceOp.MEAN else 1)
            got = results[0][call][index]
            assert got.shape == rows[0].shape
            assert got.dtype == rows[0].dtype
            if is_float:
                eps = max(float(ml_dtypes.finfo(rows[0].dtype).eps), 1.2e-7 * (spec[0] != "float64"))
                np.testing.assert_allclose(got.astype(np.float64), exact, rtol=2 * n * eps)
            else:
                np.testing.assert_array_equal(got, exact)
            assert all(other[call][index].tobytes() == got.tobytes() for other in results)


def test_shared_memory_and_direct_exchange_give_the_same_bits() -> None:
    def body(communicator: HostCommunicator) -> np.ndarray:
        generator = np.random.default_rng(communicator.rank)
        return communicator.all_reduce([generator.normal(size=5_000).astype(np.float32)])[0]

    by_name = {kind.name: kind for kind in KINDS}
    shared = by_name["shared3-file"].run(body)
    direct = by_name["ring3"].run(body)
    assert shared[0].tobytes() == direct[0].tobytes()
    # In rank order, as plain NumPy has it.
    rows = [np.random.default_rng(rank).normal(size=5_000).astype(np.float32) for rank in range(3)]
    assert shared[0].tobytes() == (rows[0] + rows[1] + rows[2]).tobytes()
