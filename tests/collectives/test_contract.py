"""What every kind of communicator must do: one suite, run on all of them, in real processes."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from phalanx.collectives import ReduceOp
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.errors import ConfigurationError, PhalanxError
from tests.collectives.kinds import KINDS, SLOW, Kind

pytestmark = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=kind.name, marks=[pytest.mark.slow] if kind.name in SLOW else []) for kind in KINDS],
)

UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
INTEGERS = (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64)


def brought(rank: int, dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """What a rank brings; every rank can work out what every other one brought."""
    generator = np.random.default_rng((seed, rank))
    if dtype is np.bool_:
        return generator.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        return generator.integers(0, 5, shape).astype(dtype)
    return generator.uniform(0.5, 2.0, shape).astype(np.float32).astype(dtype)


def expected(world_size: int, op: ReduceOp, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    rows = [brought(rank, dtype, shape) for rank in range(world_size)]
    if dtype in FLOATS:
        rows = [row.astype(np.float64) for row in rows]
    if op is ReduceOp.MEAN:
        return np.add.reduce(rows) / world_size
    merged = rows[0]
    for row in rows[1:]:
        merged = UFUNCS[op](merged, row)
    return merged


def tolerance(dtype: Any) -> float:
    """Each of up to 5 steps rounds once in float32 or better; narrow floats round once more at the end."""
    if dtype in FLOATS:
        return 8 * max(float(ml_dtypes.finfo(dtype).eps), 6e-8 if dtype is not np.float64 else 0.0)
    return 0.0


def test_all_reduce_merges_every_dtype_with_every_op(kind: Kind) -> None:
    # 0-d, empty, small (exchanged directly), and large (chunked, around the ring).
    shapes = [(), (0, 3), (7,), (3, 4, 5), (12_345,)]
    cases = [(op, dtype) for op in ReduceOp for dtype in FLOATS]
    cases += [(op, dtype) for op in UFUNCS for dtype in (*INTEGERS, np.bool_)]

    def body(communicator: HostCommunicator) -> list[list[np.ndarray]]:
        return [
            communicator.all_reduce([brought(communicator.rank, dtype, shape) for shape in shapes], op)
            for op, dtype in cases
        ]

    results = kind.run(body)
    for case, (op, dtype) in enumerate(cases):
        for index, shape in enumerate(shapes):
            first = results[0][case][index]
            assert first.dtype == np.dtype(dtype)
            assert first.shape == shape
            np.testing.assert_allclose(
                first.astype(np.float64) if dtype in FLOATS else first,
                expected(kind.world_size, op, dtype, shape),
                rtol=tolerance(dtype),
                err_msg=f"{op} {dtype} {shape}",
            )
            for other in results[1:]:
                assert other[case][index].tobytes() == first.tobytes(), "the same bits on every rank"


def test_all_reduce_of_a_list_of_mixed_and_strided_arrays(kind: Kind) -> None:
    def arrays(rank: int) -> list[np.ndarray]:
        square = brought(rank, np.float32, (300, 300))
        return [
            square.T,
            brought(rank, np.int64, (5,)),
            square[::2, 1::3],
            brought(rank, np.float16, (40_000,)),
            np.broadcast_to(np.float32(rank), (6, 2)),
            brought(rank, np.float32, (200_000,))[::-1],
            brought(rank, np.bool_, (3,)),
            brought(rank, ml_dtypes.bfloat16, (1, 1)),
        ]

    def body(communicator: HostCommunicator) -> list[np.ndarray]:
        mine = arrays(communicator.rank)
        before = [array.copy() for array in mine]
        merged = communicator.all_reduce(mine)
        for array, copy in zip(mine, before, strict=True):
            assert array.tobytes() == copy.tobytes(), "inputs are not modified"
        return merged

    results = kind.run(body)
    inputs = [arrays(rank) for rank in range(kind.world_size)]
    for index, merged in enumerate(results[0]):
        rows = [each[index] for each in inputs]
        wide = [row.astype(np.float64) if row.dtype.kind in "fV" else row for row in rows]
        assert merged.shape == rows[0].shape
        np.testing.assert_allclose(
            merged.astype(wide[0].dtype), functools.reduce(np.add, wide), rtol=tolerance(rows[0].dtype.type)
        )
        assert all(other[index].tobytes() == merged.tobytes() for other in results)


def test_all_reduce_scales_each_array_and_does_not_read_those_of_scale_zero(kind: Kind) -> None:
    size = 20_000

    def body(communicator: HostCommunicator) -> list[np.ndarray]:
        rank = communicator.rank
        bad = np.full(size, np.nan, np.float32)
        good = np.full(size, 2.0, np.float32)
        half = np.full(3, 1.0, np.float16)
        integers = np.full(3, 7)
        # The last rank counts for nothing, as one whose share of the batch is empty.
        last = rank == communicator.world_size - 1
        return communicator.all_reduce(
            [bad if last else good, good, half, integers], scale=[0.0 if last else 0.5, rank + 1, 0.25, 3.0]
        )

    n = kind.world_size
    for result in kind.run(body):
        assert (result[0] == n - 1).all()
        assert (result[1] == n * (n + 1)).all()
        assert (result[2] == np.float16(n * 0.25)).all()
        assert (result[3] == 7 * n).all(), "integers are not scaled"


def test_all_reduce_writes_to_out(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> bool:
        arrays = [np.full((100, 100), communicator.rank + 1, np.float32), np.array(1.0)]
        out = [np.zeros_like(array) for array in arrays]
        merged = communicator.all_reduce(arrays, out=out)
        assert all(a is b for a, b in zip(merged, out, strict=True))
        return bool((out[0] == sum(range(1, communicator.world_size + 1))).all())

    assert all(kind.run(body))


def test_narrow_floats_are_summed_in_float32(kind: Kind) -> None:
    # 1 + n * 2^-9 in bfloat16 (8 bits): every single sum would round back to 1.
    def body(communicator: HostCommunicator) -> float:
        value = 1.0 if communicator.rank == 0 else 2.0**-9
        (merged,) = communicator.all_reduce([np.full(50_000, value, ml_dtypes.bfloat16)])
        return float(merged[0])

    exact = 1.0 + (kind.world_size - 1) * 2.0**-9
    assert set(kind.run(body)) == {float(ml_dtypes.bfloat16(exact))}


def test_overflow_is_a_value_and_no_warning(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> bool:
        (merged,) = communicator.all_reduce([np.full(4, 60_000, np.float16)], scale=2.0)
        return bool(np.isinf(merged).all())

    assert all(kind.run(body))


@pytest.mark.parametrize("size", [0, 3, 100_000])
def test_broadcast_gives_every_rank_the_arrays_of_the_root(kind: Kind, size: int) -> None:
    def body(communicator: HostCommunicator) -> list[bool]:
        found = []
        for root in range(communicator.world_size):
            mine = np.full((size, 2), communicator.rank, np.float32)
            numbers = np.full(5, communicator.rank, ml_dtypes.bfloat16)
            other = np.zeros_like(mine) if communicator.rank else None
            got, narrow = communicator.broadcast([mine, numbers], root)
            found.append(bool((got == root).all() and (narrow == root).all() and (mine == communicator.rank).all()))
            if other is not None:
                assert got is not mine
        return found

    assert all(all(found) for found in kind.run(body))


@pytest.mark.parametrize("rows", [0, 1, 30_000])
def test_all_gather_returns_every_rank_s_array_in_order(kind: Kind, rows: int) -> None:
    def body(communicator: HostCommunicator) -> list[np.ndarray]:
        rank = communicator.rank
        return communicator.all_gather(np.full((rows * rank, 2), rank, np.int16))

    for gathered in kind.run(body):
        assert [array.shape for array in gathered] == [(rows * rank, 2) for rank in range(kind.world_size)]
        assert all((array == rank).all() for rank, array in enumerate(gathered))


def test_all_gather_of_arrays_with_gaps_and_of_another_byte_order(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> list[np.ndarray]:
        column = np.arange(8, dtype=np.float32).reshape(4, 2)[:, 1]
        return communicator.all_gather(column.astype(">f4") if communicator.rank else column)

    for gathered in kind.run(body):
        assert [array.tolist() for array in gathered] == [[1, 3, 5, 7]] * kind.world_size


def test_all_gather_of_0d_arrays(kind: Kind) -> None:
    for gathered in kind.run(lambda communicator: communicator.all_gather(np.array(1.5 * communicator.rank))):
        assert [(float(array), array.shape) for array in gathered] == [
            (1.5 * rank, ()) for rank in range(kind.world_size)
        ]


@pytest.mark.parametrize("op", list(ReduceOp))
def test_reduce_scatter_returns_this_rank_s_row(kind: Kind, op: ReduceOp) -> None:
    shape = (kind.world_size, 20, 301)

    def body(communicator: HostCommunicator) -> np.ndarray:
        return communicator.reduce_scatter(brought(communicator.rank, np.float32, shape), op)

    merged = expected(kind.world_size, op, np.float32, shape)
    for rank, row in enumerate(kind.run(body)):
        np.testing.assert_allclose(row, merged[rank], rtol=1e-6)


def test_reduce_scatter_of_a_number_for_each_rank(kind: Kind) -> None:
    size = kind.world_size
    rows = kind.run(lambda communicator: communicator.reduce_scatter(np.arange(size, dtype=np.float32)))
    assert [(float(row), row.shape) for row in rows] == [(float(rank * size), ()) for rank in range(size)]


@pytest.mark.parametrize("rows", [0, 1, 10_000])
def test_all_to_all_sends_each_array_to_its_rank(kind: Kind, rows: int) -> None:
    def body(communicator: HostCommunicator) -> list[np.ndarray]:
        rank = communicator.rank
        return communicator.all_to_all(
            [np.full((rows * (rank + to), 3), 10 * rank + to) for to in range(communicator.world_size)]
        )

    for rank, got in enumerate(kind.run(body)):
        for sender, array in enumerate(got):
            assert array.shape == (rows * (rank + sender), 3)
            assert (array == 10 * sender + rank).all()


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_bytes_travel_as_they_are(kind: Kind, size: int) -> None:
    def body(communicator: HostCommunicator) -> bool:
        rank, last = communicator.rank, communicator.world_size - 1
        gathered = communicator.all_gather_bytes(bytes([rank]) * (size + rank))
        sent = communicator.broadcast_bytes(b"x" * size if rank == last else b"ignored", root=last)
        return sent == b"x" * size and gathered == [bytes([r]) * (size + r) for r in range(last + 1)]

    assert all(kind.run(body))


def test_no_rank_leaves_a_barrier_before_all_have_come(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> bool:
        ok = True
        for turn in range(20):
            here = np.array([turn if communicator.rank == turn % communicator.world_size else 0])
            communicator.barrier()
            (top,) = communicator.all_reduce([here], ReduceOp.MAX)
            ok &= int(top[0]) == turn
        return ok

    assert all(kind.run(body))


def test_asynchronous_calls_run_in_the_order_of_submission(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> list[float]:
        rank = communicator.rank
        arrays = [np.full(5_000, i + rank, np.float32) for i in range(10)]
        handles = [
            communicator.run_async("all_reduce", functools.partial(communicator.all_reduce, [array]))
            for array in arrays
        ]
        # A blocking call queues behind them.
        (after,) = communicator.all_reduce([np.array([1.0])])
        assert all(handle.done() for handle in handles)
        return [float(handle.wait(5.0)[0][0]) for handle in handles] + [float(after[0])]

    n = kind.world_size
    assert kind.run(body)[0] == [n * i + n * (n - 1) / 2 for i in range(10)] + [n]


def test_many_small_calls_of_all_sorts_stay_in_step(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> bool:
        generator = np.random.default_rng(5)
        ok = True
        for _ in range(150):
            size = int(generator.integers(0, 60_000))
            choice = int(generator.integers(0, 4))
            if choice == 0:
                (merged,) = communicator.all_reduce([np.full(size, 1, np.int32)])
                ok &= bool((merged == communicator.world_size).all())
            elif choice == 1:
                (sent,) = communicator.broadcast([np.full(size, communicator.rank)], 0)
                ok &= bool((sent == 0).all())
            elif choice == 2:
                ok &= len(communicator.all_gather(np.zeros(size % 77))) == communicator.world_size
            else:
                communicator.barrier()
        return ok

    assert all(kind.run(body))


def test_arguments_are_checked_before_anything_is_sent(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> int:
        n = communicator.world_size
        wrong = [
            lambda: communicator.all_reduce([np.array([1, 2])], ReduceOp.MEAN),
            lambda: communicator.all_reduce([np.array([True])], ReduceOp.MEAN),
            lambda: communicator.all_reduce([np.array(["text"])]),
            lambda: communicator.all_reduce([np.array([1j])]),
            lambda: communicator.all_reduce([np.ones(2)], ReduceOp.MAX, scale=2.0),
            lambda: communicator.all_reduce([np.ones(2)], scale=[1.0, 2.0]),
            lambda: communicator.all_reduce([np.ones(2)], out=[np.ones(3)]),
            lambda: communicator.all_reduce([np.ones(2)], out=[np.ones(2, np.float32)]),
            lambda: communicator.all_reduce([np.ones(2)], out=[np.ones(4)[::2]]),
            lambda: communicator.all_reduce([np.ones(2)], out=[]),
            lambda: communicator.broadcast([np.ones(2)], root=n),
            lambda: communicator.broadcast([np.array([None])]),
            lambda: communicator.broadcast_bytes(b"", root=-1),
            lambda: communicator.reduce_scatter(np.ones((n + 1, 2))),
            lambda: communicator.reduce_scatter(np.array(1.0)),
            lambda: communicator.all_to_all([np.ones(2)] * (n + 1)),
            lambda: communicator.all_to_all([np.array(1.0)] * n),
            lambda: communicator.all_gather(np.array([{}])),
        ]
        for call in wrong:
            with pytest.raises(ConfigurationError):
                call()
        (merged,) = communicator.all_reduce([np.ones(2)])  # All is well afterwards.
        return int(merged[0])

    assert set(kind.run(body)) == {kind.world_size}


def test_close_may_be_called_twice_and_ends_all_use(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> bool:
        handle = communicator.run_async("all_reduce", lambda: communicator.all_reduce([np.ones(3)]))
        handle.wait(20.0)
        communicator.close()
        communicator.close()
        for call in (
            communicator.barrier,
            lambda: communicator.run_async("all_reduce", lambda: communicator.all_reduce([np.ones(1)])),
        ):
            with pytest.raises(PhalanxError, match="closed"):
                call()
        return True

    assert all(kind.run(body))


def test_all_reduce_in_place(kind: Kind) -> None:
    shapes = [(), (7,), (3, 4, 5), (30_000,)]

    def body(communicator: HostCommunicator) -> list[list[np.ndarray]]:
        found = []
        for dtype in (np.float32, np.float16, np.int64):
            arrays = [brought(communicator.rank, dtype, shape) for shape in shapes]
            results = communicator.all_reduce(arrays, out=arrays)
            assert all(result is array for result, array in zip(results, arrays, strict=True))
            expect = communicator.all_reduce([brought(communicator.rank, dtype, shape) for shape in shapes])
            for result, other in zip(results, expect, strict=True):
                np.testing.assert_array_equal(result, other)
            found.append(results)
        return found

    for results in zip(*kind.run(body), strict=True):
        for index, shape in enumerate(shapes):
            dtype = results[0][index].dtype.type
            np.testing.assert_allclose(
                results[0][index].astype(np.float64),
                expected(kind.world_size, ReduceOp.SUM, dtype, shape),
                rtol=tolerance(dtype),
            )
