"""The collectives themselves, on NumPy arrays."""

from __future__ import annotations

import itertools
import time

import ml_dtypes
import numpy as np
import pytest

import phalanx.horovod.numpy as hvd
from phalanx.horovod.common.process_sets import get_process_set_ids_and_ranks
from tests.support.traces import Events, named, names_of_processes, traced

FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)
UFUNCS = {hvd.Sum: np.add, hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}


def _of(rank: int, dtype, shape) -> np.ndarray:
    """What a rank brings; every rank knows all of them."""
    return np.random.default_rng((rank, 7)).integers(1, 5, shape).astype(dtype)


def _all(dtype, shape) -> list[np.ndarray]:
    return [_of(rank, dtype, shape) for rank in range(hvd.size())]


def check_allreduce_of_every_dtype_and_op() -> None:
    shapes = [(), (0,), (17,), (3, 4, 5)]
    for dtype, (op, ufunc), shape in itertools.product(FLOATS + INTEGERS, UFUNCS.items(), shapes):
        rows = [row.astype(np.float64) if dtype in FLOATS else row for row in _all(dtype, shape)]
        expected = rows[0]
        for row in rows[1:]:
            expected = ufunc(expected, row)
        merged = hvd.allreduce(_of(hvd.rank(), dtype, shape), op=op)
        assert merged.dtype == np.dtype(dtype)
        # Small whole numbers: exact in every dtype.
        np.testing.assert_array_equal(merged.astype(np.float64), np.asarray(expected, np.float64))


def check_averages_of_floats_are_exact_and_of_integers_cut_off() -> None:
    for dtype in FLOATS + INTEGERS:
        mean = np.mean([row.astype(np.float64) for row in _all(dtype, (9,))], axis=0)
        averaged = hvd.allreduce(_of(hvd.rank(), dtype, (9,)))
        expected = mean.astype(dtype) if dtype in FLOATS else np.trunc(mean).astype(dtype)
        np.testing.assert_allclose(averaged.astype(np.float64), expected.astype(np.float64), rtol=1e-7)
    for value in (np.uint8(200), np.int8(-100), np.int64(2**53 + 1), np.uint64(2**60 + 1)):
        alike = np.full((hvd.size() + 1, 2), value)
        assert (hvd.allreduce(alike) == value).all(), "a sum that does not fit is no matter"
        assert (hvd.reducescatter(alike) == value).all()


def check_an_average_of_halves_whose_sum_overflows_is_right_in_every_company() -> None:
    halves, integers = np.full(2 * hvd.size(), 40_000, np.float16), np.full(3, 5, np.int8)
    for averaged in (hvd.allreduce(halves), hvd.grouped_allreduce([integers, halves])[1], hvd.reducescatter(halves)):
        assert (averaged == 40_000).all(), averaged
    handles = [hvd.allreduce_async(each, name=f"fused.{each.dtype}") for each in (integers, halves)]
    assert [hvd.synchronize(handle)[0] for handle in handles] == [5, 40_000]


def check_what_overflows_is_infinite_whatever_numpy_is_told() -> None:
    with np.errstate(all="raise"):
        own = np.array([3e38 if hvd.rank() == 0 else 1.0], np.float32)
        assert hvd.allreduce(own, op=hvd.Max, prescale_factor=2.0)[0] == np.inf
        assert hvd.allreduce(np.array([7e4], np.float32), compression=hvd.Compression.fp16)[0] == np.inf
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == hvd.size()


def check_booleans_merge_by_or_and_and() -> None:
    mine = np.array([True, False, hvd.rank() == 0])
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [True, False, True]
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [True, False, hvd.size() == 1]
    with pytest.raises(ValueError, match="cannot be averaged"):
        hvd.allreduce(mine)


def check_prescale_and_postscale() -> None:
    for op in (hvd.Sum, hvd.Average):
        total = np.sum(_all(np.float64, (6,)), axis=0) / (hvd.size() if op is hvd.Average else 1)
        for dtype in (np.float16, np.float32, np.float64):
            merged = hvd.allreduce(_of(hvd.rank(), dtype, (6,)), op=op, prescale_factor=0.5, postscale_factor=3.0)
            np.testing.assert_allclose(merged, (1.5 * total).astype(dtype), rtol=2e-3 if dtype is np.float16 else 1e-6)
    halves = np.sum([np.trunc(0.5 * row) for row in _all(np.int32, (6,))], axis=0)
    np.testing.assert_array_equal(
        hvd.allreduce(_of(hvd.rank(), np.int32, (6,)), op=hvd.Sum, prescale_factor=0.5), halves.astype(np.int32)
    )
    # An average of integers is truncated once: -7 over the ranks, times 10.
    total = np.array([-7 if hvd.rank() == 0 else 0] * hvd.size(), np.int16)
    expected = int(-70 / hvd.size())
    assert hvd.allreduce(total, op=hvd.Average, postscale_factor=10.0).tolist() == [expected] * hvd.size()
    assert hvd.reducescatter(total, op=hvd.Average, postscale_factor=10.0).tolist() == [expected]


def check_inputs_stay_as_they_are() -> None:
    mine = np.arange(5.0)[::2]
    hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0)
    assert mine.tolist() == [0.0, 2.0, 4.0]


def check_names_may_come_in_any_order() -> None:
    count = 40
    order = np.random.default_rng(hvd.rank()).permutation(count)
    handles = {int(i): hvd.allreduce_async(np.full(3, float(i)), name=f"order.{i}", op=hvd.Sum) for i in order}
    for i in np.random.default_rng(hvd.rank() + 100).permutation(count):
        assert hvd.synchronize(handles[int(i)]).tolist() == [float(i) * hvd.size()] * 3
    # Once more: all are known by now.
    handles = {int(i): hvd.allreduce_async(np.full(3, float(i)), name=f"order.{i}", op=hvd.Sum) for i in order}
    for i, handle in handles.items():
        assert hvd.synchronize(handle)[0] == i * hvd.size()


def check_names_that_repeat_with_other_shapes() -> None:
    for length in (3, 5, 3, 4):
        assert hvd.allreduce(np.ones(length), name="changing", op=hvd.Sum).shape == (length,)


def check_poll_says_when_it_is_done_without_waiting() -> None:
    handle = hvd.allreduce_async(np.ones(3), name="polled", op=hvd.Sum)
    while not hvd.poll(handle):
        pass  # the background works meanwhile
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3, "again"


def check_a_name_in_use_is_an_error() -> None:
    first = hvd.rank() == 0
    handle = hvd.allreduce_async(np.ones(3), name="twice") if first else None
    if first:
        with pytest.raises(hvd.HorovodInternalError, match="already running"):
            hvd.allreduce_async(np.ones(3), name="twice")
    handle = handle or hvd.allreduce_async(np.ones(3), name="twice")
    hvd.synchronize(handle)


def check_groups_begin_together() -> None:
    arrays = [np.full(n, float(hvd.rank()), dtype) for n, dtype in ((2, np.float32), (5, np.float64), (0, np.float32))]
    handles = [hvd.grouped_allreduce_async(arrays, name="group", op=hvd.Sum)]
    total = sum(range(hvd.size()))
    merged = hvd.synchronize(handles[0])
    assert [array.tolist() for array in merged] == [[total] * 2, [total] * 5, []]
    assert [array.dtype for array in merged] == [np.float32, np.float64, np.float32]
    gathered = hvd.grouped_allgather([np.full(hvd.rank(), 1.0), np.zeros((1, 2))])
    assert [array.shape for array in gathered] == [(total,), (hvd.size(), 2)]
    scattered = hvd.grouped_reducescatter([np.ones(hvd.size()), np.ones((hvd.size(), 3))], op=hvd.Sum)
    assert [array.tolist() for array in scattered] == [[hvd.size()], [[hvd.size()] * 3]]


def _raises_everywhere(call, *words: str) -> None:
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    # And the job goes on.
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == hvd.size()


def check_differences_between_ranks_raise_on_every_rank() -> None:
    last = hvd.rank() == hvd.size() - 1
    rank = f"rank {hvd.size() - 1}"
    for name in ("new", "known"):
        if name == "known":
            hvd.allreduce(np.ones((17, 3)), name="known")
        _raises_everywhere(
            lambda: hvd.allreduce(np.ones((17, 4 if last else 3)), name=name),  # noqa: B023
            f"Mismatched shapes for '{name}'",
            "(17, 3)",
            "(17, 4)",
            rank,
        )
    _raises_everywhere(
        lambda: hvd.allreduce(np.ones(4, np.int32 if last else np.float32), op=hvd.Sum),
        "Mismatched data types",
        "int32",
        "float32",
        rank,
    )
    _raises_everywhere(
        lambda: hvd.allreduce(np.ones(4), op=hvd.Min if last else hvd.Max), "Mismatched arguments", "Min", "Max"
    )
    _raises_everywhere(
        lambda: hvd.allreduce(np.ones(4), prescale_factor=2.0 if last else 1.0), "Mismatched scale factors"
    )
    _raises_everywhere(lambda: hvd.broadcast(np.ones(4), hvd.rank()), "Mismatched root ranks")
    _raises_everywhere(lambda: hvd.broadcast(np.ones(5 if last else 4), 0), "Mismatched shapes")
    _raises_everywhere(lambda: hvd.allgather(np.ones((2, 5 if last else 4))), "Mismatched shapes", "(*, 5)")
    _raises_everywhere(lambda: hvd.allgather(np.ones((2, 2) if last else (2,))), "Mismatched shapes")
    _raises_everywhere(
        lambda: hvd.alltoall(np.ones(hvd.size(), np.int32 if last else np.float32)), "Mismatched data types"
    )
    _raises_everywhere(lambda: hvd.reducescatter(np.ones((4, 3 if last else 2))), "Mismatched shapes")
    _raises_everywhere(
        lambda: hvd.allgather(np.ones(2), name="kind") if last else hvd.allreduce(np.ones(2), name="kind"),
        "Mismatched operations",
    )
    _raises_everywhere(
        lambda: hvd.grouped_allreduce([np.ones(2)] * (3 if last else 2), name="group"), "Mismatched groups"
    )


def check_wrong_arguments_raise_before_anything_is_sent() -> None:
    for call, words in (
        (lambda: hvd.allreduce(np.array(["a"])), "dtype"),
        (lambda: hvd.allreduce(np.ones(2), op="sum"), "must be one of"),
        (lambda: hvd.allreduce(np.ones(2), average=True, op=hvd.Sum), "supersedes"),
        (lambda: hvd.allgather(np.array(["a", "bb"])), "strings and records"),
        (lambda: hvd.broadcast(np.zeros(2, [("a", "f4")]), 0), "strings and records"),
        (lambda: hvd.allreduce(np.ones(2), name=5), "a name is a string"),
        (lambda: hvd.allgather(np.float32(1)), "single number"),
        (lambda: hvd.broadcast(np.ones(2), hvd.size()), "no rank"),
        (lambda: hvd.alltoall(np.ones(hvd.size() + 1)), "Pass splits"),
        (lambda: hvd.alltoall(np.ones(3), [1] * (hvd.size() + 1)), "one number"),
        (lambda: hvd.alltoall(np.ones(3), [3] * hvd.size()), "add up to"),
        (lambda: hvd.alltoall(np.ones(hvd.size()), [1.0] * hvd.size()), "integers"),
        (lambda: hvd.reducescatter(np.ones(2, bool)), "booleans"),
        (lambda: hvd.allreduce(np.ones(2), prescale_factor=float("nan")), "finite"),
        (lambda: hvd.allreduce(np.ones(2), name="half \ud800"), "printed"),
        (lambda: hvd.add_process_set([0.0]), "integers"),
        (lambda: hvd.allreduce(np.ones(2, np.int32), op=hvd.Adasum), "floats"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(NotImplementedError, match="cannot merge"):
        hvd.reducescatter(np.ones(2), op=hvd.Adasum)
    assert hvd.allreduce(np.ones(2), average=False)[0] == hvd.size()


def check_allgather_of_different_lengths() -> None:
    for dtype in FLOATS + INTEGERS + (np.bool_,):
        mine = np.full((hvd.rank() * 2, 3), hvd.rank()).astype(dtype)  # rank 0 has nothing
        gathered = hvd.allgather(mine, name="uneven")
        expected = [np.full((rank * 2, 3), rank).astype(dtype) for rank in range(hvd.size())]
        assert gathered.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(gathered.astype(np.float32), np.concatenate(expected).astype(np.float32))


def check_broadcast_from_every_rank() -> None:
    for dtype, root in itertools.product(FLOATS + INTEGERS + (np.bool_,), range(hvd.size())):
        received = hvd.broadcast(_of(hvd.rank(), dtype, (4, 3)), root)
        np.testing.assert_array_equal(received.astype(np.float32), _of(root, dtype, (4, 3)).astype(np.float32))


def check_arrays_of_the_other_byte_order() -> None:
    value = np.arange(3, dtype=">f4") + hvd.rank()
    merged = hvd.allreduce(value, op=hvd.Sum)
    np.testing.assert_allclose(merged, np.arange(3) * hvd.size() + sum(range(hvd.size())))
    mixed = np.arange(3, dtype=">i4" if hvd.rank() else "<i4")
    assert hvd.broadcast(mixed, 0).tolist() == [0, 1, 2]


def check_alltoall_in_equal_parts_and_with_splits() -> None:
    size, rank = hvd.size(), hvd.rank()
    received = hvd.alltoall(np.arange(size * 2) + 100 * rank)
    assert received.tolist() == [100 * sender + 2 * rank + i for sender in range(size) for i in range(2)]
    # Rank r sends r + 1 rows to each.
    received, counts = hvd.alltoall(np.full((size * (rank + 1), 2), rank), [rank + 1] * size)
    assert received[:, 0].tolist() == [sender for sender in range(size) for _ in range(sender + 1)]
    assert counts.tolist() == [sender + 1 for sender in range(size)]


def check_alltoall_with_zero_splits() -> None:
    size, rank = hvd.size(), hvd.rank()
    # All ranks send everything to rank 0; then nothing to themselves; then nothing at all.
    received, counts = hvd.alltoall(np.full(3, rank), [3] + [0] * (size - 1))
    assert received.tolist() == ([sender for sender in range(size) for _ in range(3)] if rank == 0 else [])
    assert counts.tolist() == [3 if rank == 0 else 0] * size
    received, counts = hvd.alltoall(np.full(size - 1, rank), [int(receiver != rank) for receiver in range(size)])
    assert received.tolist() == [sender for sender in range(size) if sender != rank]
    received, counts = hvd.alltoall(np.empty((0, 4), np.float32), [0] * size)
    assert received.shape == (0, 4)
    assert not counts.any()


def check_reducescatter_of_rows_that_cannot_be_divided() -> None:
    size, rank = hvd.size(), hvd.rank()
    for rows, dtype in itertools.product((2 * size, 2 * size + 1, size - 1, 0), FLOATS + INTEGERS):
        counts = [rows // size + (one < rows % size) for one in range(size)]
        start = sum(counts[:rank])
        total = np.sum([row.astype(np.float64) for row in _all(dtype, (rows, 2))], axis=0)
        part = hvd.reducescatter(_of(rank, dtype, (rows, 2)), op=hvd.Sum)
        np.testing.assert_array_equal(part.astype(np.float64), total[start : start + counts[rank]])
    part = hvd.reducescatter(np.full(size, rank + 1.0), prescale_factor=2.0, postscale_factor=5.0)
    np.testing.assert_allclose(part, [10 * (size + 1) / 2])


def check_adasum_of_equal_and_of_orthogonal_gradients() -> None:
    if hvd.size() & (hvd.size() - 1):
        with pytest.raises(ValueError, match="power of 2"):
            hvd.allreduce(np.ones(3), op=hvd.Adasum)
        return
    np.testing.assert_allclose(hvd.allreduce(np.arange(1, 4.0), op=hvd.Adasum), np.arange(1, 4.0))
    mine = np.zeros(hvd.size())
    mine[hvd.rank()] = 2.0
    np.testing.assert_allclose(hvd.allreduce(mine, op=hvd.Adasum), np.full(hvd.size(), 2.0))
    np.testing.assert_allclose(hvd.allreduce(np.zeros(3, np.float16), op=hvd.Adasum), np.zeros(3))


def check_barrier_and_objects() -> None:
    hvd.barrier()
    mine = {"rank": hvd.rank(), "data": list(range(hvd.rank()))}
    assert hvd.allgather_object(mine) == [{"rank": r, "data": list(range(r))} for r in range(hvd.size())]
    for root in range(hvd.size()):
        assert hvd.broadcast_object(mine, root) == {"rank": root, "data": list(range(root))}
    assert hvd.broadcast_object(None, 0) is None


def check_join_counts_as_zeros_and_tells_who_was_last() -> None:
    """Rank r has r batches more than rank 0."""
    size, rank = hvd.size(), hvd.rank()
    for step in range(3 + rank):
        for name in ("joined.a", "joined.b"):
            present = sum(step < 3 + other for other in range(size))
            merged = hvd.allreduce(np.ones(4), name=name, op=hvd.Sum)
            assert merged.tolist() == [present] * 4, "who has joined counts as zeros"
        averaged = hvd.allreduce(np.full(2, 6.0), name=f"late.{step}")
        np.testing.assert_allclose(averaged, 6.0 * present / size, err_msg="divided by all")
        for value in (np.full(2, 5.0), np.full(2, 5), np.full(2, -5)):
            for op in (hvd.Min, hvd.Max):
                assert (hvd.allreduce(value, op=op, prescale_factor=-1.0) == -value).all(), "who has joined has no say"
        assert hvd.allreduce(np.full(1, 2), op=hvd.Product)[0] == 2**present
    assert hvd.join() == size - 1
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == size, "afterwards all take part again"
    for _ in range(2 + rank):
        hvd.allreduce(np.ones(1))
    hvd.join()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == size, "and what has no name meets again"


def check_other_operations_are_refused_while_a_rank_has_joined() -> None:
    if hvd.rank():
        # Rank 0 has joined before the others come to the barrier.
        hvd.barrier()
        with pytest.raises(hvd.HorovodInternalError, match="has joined"):
            hvd.allgather(np.ones(2), name="refused")
        with pytest.raises(hvd.HorovodInternalError, match="has joined"):
            hvd.broadcast(np.ones(2), 1, name="refused too")
    hvd.join()


def check_process_sets() -> None:
    size, rank = hvd.size(), hvd.rank()
    assert hvd.global_process_set.ranks == list(range(size))
    evens, odds = hvd.add_process_set(range(0, size, 2)), hvd.add_process_set(hvd.ProcessSet(range(1, size, 2)))
    mine, other = (odds, evens) if rank % 2 else (evens, odds)
    assert mine.included()
    assert not other.included()
    assert (mine.size(), mine.rank()) == (len(mine.ranks), mine.ranks.index(rank))
    assert get_process_set_ids_and_ranks()[evens.process_set_id] == evens.ranks
    total = float(sum(mine.ranks))
    for _ in range(3):
        assert hvd.allreduce(np.full(3, float(rank)), op=hvd.Sum, process_set=mine, name="own").tolist() == [total] * 3
    np.testing.assert_allclose(hvd.allreduce(np.array([float(rank)]), process_set=mine), total / len(mine.ranks))
    root = mine.ranks[-1]
    assert hvd.broadcast(np.array([rank]), root, process_set=mine)[0] == root, "roots are ranks of the job"
    assert hvd.allgather(np.full(rank, rank), process_set=mine).tolist() == [r for r in mine.ranks for _ in range(r)]
    assert hvd.alltoall(np.full(mine.size(), rank), process_set=mine).tolist() == mine.ranks
    assert hvd.broadcast_object({"from": rank}, root, process_set=mine) == {"from": root}
    hvd.barrier(mine)
    with pytest.raises(ValueError, match="no member"):
        hvd.allreduce(np.ones(1), process_set=other)
    with pytest.raises(ValueError, match="no rank"):
        hvd.broadcast(np.ones(1), next(iter(other.ranks), size), process_set=mine)
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set(evens.ranks)
    # Of both kinds at the same time.
    handles = [
        hvd.allreduce_async(np.ones(2), name="both", op=hvd.Sum, process_set=s) for s in (mine, hvd.global_process_set)
    ]
    assert [hvd.synchronize(handle)[0] for handle in reversed(handles)] == [size, len(mine.ranks)]
    assert hvd.remove_process_set(evens)
    assert hvd.remove_process_set(odds)
    assert not hvd.remove_process_set(evens)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(np.ones(1), process_set=evens)


def check_process_sets_of_different_ranks_raise_everywhere() -> None:
    with pytest.raises(hvd.HorovodInternalError, match="add_process_set"):
        hvd.add_process_set([0] if hvd.rank() else [1])
    with pytest.raises(ValueError, match="needs ranks"):
        hvd.add_process_set([hvd.size()])
    twice = [hvd.ProcessSet([0]), hvd.ProcessSet([0])]
    with pytest.raises(ValueError, match="already"):
        hvd.init(process_sets=twice)
    assert list(get_process_set_ids_and_ranks()) == [0], "an error leaves none of them registered"


def check_who_and_where() -> None:
    assert hvd.is_initialized()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    built = (hvd.mpi_built(), hvd.gloo_built(), hvd.nccl_built(), hvd.ccl_built(), hvd.ddl_built(), hvd.cuda_built())
    assert not any(built)


def check_large_arrays_and_many_small_ones() -> None:
    large = hvd.allreduce_async(np.full(3_000_000, hvd.rank() + 1.0, np.float32), name="large", op=hvd.Sum)
    small = [hvd.allreduce_async(np.full(5, float(i)), name=f"small.{i}", op=hvd.Max) for i in range(200)]
    total = sum(range(1, hvd.size() + 1))
    assert [hvd.synchronize(handle)[0] for handle in small] == list(map(float, range(200)))
    assert (hvd.synchronize(large) == total).all()


def check_the_timeline_can_be_started_and_stopped() -> None:
    events: Events = []
    with traced(hvd, events, mark_cycles=True):
        with pytest.raises(ValueError, match="started already"):
            hvd.start_timeline("another.json")
        hvd.allreduce(np.ones(50_000, np.float32), name="gradient")
        hvd.allgather(np.ones(hvd.rank() + 1), name="rows")
    hvd.stop_timeline()
    assert sorted(names_of_processes(events)) == list(range(hvd.size()))
    for rank in range(hvd.size()):
        assert named(events, "CYCLE_START", rank)
        for name in ("gradient", "NEGOTIATE_ALLREDUCE", "ALLREDUCE"):
            assert {event["id"] for event in named(events, name, rank)} == {f"{rank} gradient"}
        assert named(events, "ALLREDUCE", rank)[0]["args"]["bytes"] == 200_000
        assert any(event["args"]["bytes"] == 200_000 for event in named(events, "all_reduce", rank))
        assert named(events, "all_gather", rank)


def check_after_shutdown_the_job_can_be_met_again() -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.rank()
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 0:
        time.sleep(0.5)  # the others have left, and come back, before it has left
    hvd.shutdown()
    hvd.init()
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == hvd.size()
