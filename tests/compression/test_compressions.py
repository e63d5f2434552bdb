"""Compressed sums on real communicators: bounds of the error, the same bits everywhere, what is remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from phalanx import compression
from phalanx.cluster.membership import Membership
from phalanx.collectives import connect
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.compression import Codec, CompressedReducer, Compression, PowerSGD, TopK, resolve
from phalanx.compression.power_sgd import _orthogonal, matrix_shape
from phalanx.errors import ConfigurationError
from tests.support.processes import run_threads

NAMES = ("float16", "bfloat16", "int8", "int6", "int4", "top_k", "power_sgd")
SHAPES = ((64, 96), (3, 3, 16, 32), (5000,))
# Of the largest value of a sum: what one step may be off. PowerSGD and top-k lose more, which feedback brings later.
ERROR = {"float16": 1e-3, "bfloat16": 1e-2, "int8": 1e-2, "int6": 4e-2, "int4": 0.2}


def on_ranks(function: Callable[[HostCommunicator], Any], world_size: int = 3, hosts: str = "aabb") -> list[Any]:
    """What `function` returns on each rank of a job whose ranks are on one host and another."""

    def body(membership: Membership) -> Any:
        with connect(membership) as communicator:
            return function(communicator)

    return run_threads(body, world_size, hosts=list(hosts[:world_size]))


def gradients(rank: int, step: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Any]:
    random = np.random.default_rng([rank, step])
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def taken(kind: Compression) -> list[tuple[int, ...]]:
    return [shape for shape in SHAPES if kind.takes(shape, np.dtype(np.float32))]


def sums(
    reducer: CompressedReducer, communicator: Any, arrays: Sequence[Any], scales: Sequence[float], **options: Any
) -> list[Any]:
    out = [np.empty_like(array) for array in arrays]
    reducer.all_reduce(communicator, arrays, scales, out, **options)
    reducer.commit()
    return out


@pytest.mark.parametrize("name", NAMES)
def test_the_sum_is_near_and_the_same_on_all_ranks(name: str) -> None:
    shapes = taken(resolve(name))
    assert shapes

    def body(communicator: HostCommunicator) -> list[Any]:
        arrays = gradients(communicator.rank, shapes=shapes)
        return sums(CompressedReducer(resolve(name)), communicator, arrays, [0.5] * len(arrays))

    ranks = on_ranks(body)
    for result in ranks[1:]:
        for mine, first in zip(result, ranks[0], strict=True):
            assert mine.tobytes() == first.tobytes()
    if name in ERROR:
        for index, result in enumerate(ranks[0]):
            exact = sum(0.5 * gradients(rank, shapes=shapes)[index] for rank in range(3))
            np.testing.assert_allclose(result, exact, atol=ERROR[name] * np.abs(exact).max())


@pytest.mark.parametrize("name", ["int8", "int6", "int4", "top_k", "power_sgd"])
def test_what_is_lost_comes_later(name: str) -> None:
    """After T steps the sums of all that was merged and of all that was brought differ by what is still waiting."""
    shapes = taken(resolve(name))

    def body(communicator: HostCommunicator) -> tuple[list[Any], list[Any]]:
        reducer = CompressedReducer(resolve(name))
        total = [np.zeros(shape) for shape in shapes]
        for step in range(12):
            merged = sums(reducer, communicator, gradients(communicator.rank, step, shapes), [1.0] * len(shapes))
            total = [t + m for t, m in zip(total, merged, strict=True)]
        waiting = [array for key, array in reducer.state().items() if key.startswith("own/")]
        return total, waiting

    ranks = on_ranks(body, 2)
    for index, shape in enumerate(shapes):
        brought = sum(gradients(rank, step, shapes)[index].astype(float) for rank in range(2) for step in range(12))
        waiting = sum(found[1][index].astype(float) for found in ranks)
        np.testing.assert_allclose(ranks[0][0][index] + waiting, brought, atol=2e-3, err_msg=str(shape))


def test_power_sgd_does_not_forget_small_rows_and_columns() -> None:
    """To an optimizer that divides by them they are as much as the others."""
    matrix = gradients(0, shapes=[(96, 128)])[0]
    matrix[:24] *= 1e-2
    matrix[:, :32] *= 1e-2

    def body(communicator: HostCommunicator) -> Any:
        reducer = CompressedReducer(PowerSGD(16, feedback=False))
        for _ in range(20):
            (merged,) = sums(reducer, communicator, [matrix], [0.5])
        return merged

    merged = on_ranks(body, 2)[0]

    def lost(part: Any) -> float:
        return float(np.linalg.norm(merged[part] - matrix[part]) / np.linalg.norm(matrix[part]))

    large = lost(np.s_[24:, 32:])
    for small in (np.s_[:24, 32:], np.s_[24:, :32], np.s_[:24, :32]):
        assert lost(small) < 1.5 * large


def test_power_sgd_finds_a_matrix_of_its_rank() -> None:
    """The sum has rank 4, so the warm start leads to it exactly."""
    left, right = np.random.default_rng(0).standard_normal((2, 64, 4)).astype(np.float32)
    matrix = left @ right.T

    def body(communicator: HostCommunicator) -> Any:
        reducer = CompressedReducer(PowerSGD(4, feedback=False, factors=None))
        for _ in range(2):
            (found,) = sums(reducer, communicator, [matrix], [1 / 3])
        return found

    np.testing.assert_allclose(on_ranks(body)[0], matrix, atol=1e-4)


def test_power_sgd_sums_whole_what_a_product_would_not_make_smaller() -> None:
    shapes: list[tuple[int, ...]] = [(4096,), (64, 64), (), (8, 8), (0, 3), (64, 64), (0, 0), (3, 3, 4, 16)]
    kind = PowerSGD(8, factors=None)
    assert [kind.rank_of(shape) for shape in shapes] == [0, 8, 0, 0, 0, 8, 0, 5]

    def body(communicator: HostCommunicator) -> list[Any]:
        return sums(
            CompressedReducer(kind), communicator, gradients(communicator.rank, shapes=shapes), [1.0] * len(shapes)
        )

    found = on_ranks(body, 2)[0]
    exact = [sum(of) for of in zip(*(gradients(rank, shapes=shapes) for rank in range(2)), strict=True)]
    for shape, sum_, exactly in zip(shapes, found, exact, strict=True):
        assert sum_.shape == shape
        if kind.rank_of(shape):  # the part of a random matrix that lies in so many directions
            assert 0.3 < np.linalg.norm(sum_ - exactly) / np.linalg.norm(exactly) < 0.99
            assert np.linalg.matrix_rank(sum_.reshape(matrix_shape(shape))) == kind.rank_of(shape)
        else:
            np.testing.assert_allclose(sum_, exactly, rtol=1e-6)


@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-4, 1e-7, 0.0])
def test_bases_are_orthonormal_even_of_what_is_dependent(apart: float) -> None:
    """Rows that are all near to each other, of very different lengths, beside some that are zero."""
    random = np.random.default_rng(2)
    rows = random.standard_normal((3, 1, 64)) + apart * random.standard_normal((3, 8, 64))
    rows *= 10.0 ** random.integers(-6, 6, (3, 8, 1))
    rows[1, 2:4] = 0.0
    for stack in (rows[::2], rows):
        with np.errstate(invalid="ignore"):
            bases = _orthogonal(stack.astype(np.float32))
        np.testing.assert_allclose(bases @ bases.swapaxes(1, 2), np.tile(np.eye(8), (len(stack), 1, 1)), atol=2e-3)


def test_top_k_takes_the_largest() -> None:
    array = np.arange(-2000, 2001, dtype=np.float32)
    for ratio in (0.001, 0.5):  # places by their numbers, and by bits
        codec = TopK(ratio, values=None)
        parts = codec.encode(array)
        decoded = codec.decode(parts, array.size)
        count = math.ceil(ratio * array.size)
        assert np.count_nonzero(decoded) == count
        assert np.abs(decoded[decoded != 0]).min() >= 2000 - (count - 1) // 2 - 1
        assert set(decoded.tolist()) <= {0.0, *array.tolist()}
        assert sum(part.nbytes for part in parts) == 4 * count + min(4 * count, -(-array.size // 8))


@pytest.mark.parametrize("kind", [compression.Int8, compression.Int6, compression.Int4])
def test_whole_numbers_travel_exactly_in_any_order(kind: Any) -> None:
    """All numbers that there are, each beside each other one, in the bytes that so many bits need."""
    largest = 2 ** (kind.bits - 1) - 1
    numbers = np.arange(-largest, largest + 1)
    pairs = np.stack(np.meshgrid(numbers, numbers), axis=-1).reshape(-1)
    codec = kind(chunk=len(pairs) + -len(pairs) % 4)
    for values in (pairs, np.roll(pairs, 1)):
        packed, scales = codec.encode(values.astype(np.float32))
        assert scales.tolist() == [1.0]
        assert packed.nbytes == codec.chunk * kind.bits // 8
        np.testing.assert_array_equal(codec.decode([packed, scales], len(values)), values)


def test_eight_bits_send_no_more_from_more_ranks() -> None:
    """The bytes that a rank sends stay below a quarter of the sum's own, both ways."""

    def body(communicator: HostCommunicator) -> int:
        before = communicator.statistics.bytes_on_links
        sums(CompressedReducer(resolve("int8")), communicator, [np.ones((512, 512), np.float32)], [1.0])
        return communicator.statistics.bytes_on_links - before

    for ranks in (2, 4):
        assert max(on_ranks(body, ranks, "abcd")) <= 2 * (ranks - 1) / ranks * 512 * 512 * 1.03


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_one_rank_is_found_on_all_and_not_remembered(name: str, value: float) -> None:
    shapes = taken(resolve(name))[:1]

    def body(communicator: HostCommunicator) -> tuple[bool, bool]:
        reducer = CompressedReducer(resolve(name))
        sums(reducer, communicator, gradients(communicator.rank, 0, shapes), [1.0])
        before = reducer.state()
        bad = gradients(communicator.rank, 1, shapes)
        if communicator.rank == 1:
            bad[0].flat[7], bad[0].flat[2000] = value, -value
        with np.errstate(all="raise"):  # it is found where gradients are unscaled, and no warning is needed
            merged = sums(reducer, communicator, bad, [1.0])
        after = reducer.state()
        same = before.keys() == after.keys() and all(before[key] is after[key] for key in before)
        return bool(np.isfinite(merged[0]).all()), same

    assert on_ranks(body) == [(False, True)] * 3


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_without_samples_is_not_read(name: str) -> None:
    shapes = taken(resolve(name))[:1]

    def body(communicator: HostCommunicator) -> bool:
        arrays = [np.full(shapes[0], np.nan, np.float32)] if communicator.rank else gradients(0, 0, shapes)
        merged = sums(CompressedReducer(resolve(name)), communicator, arrays, [0.0 if communicator.rank else 1.0])
        return bool(np.isfinite(merged[0]).all())

    assert on_ranks(body) == [True] * 3


def test_the_feedback_follows_the_scale_of_the_loss() -> None:
    """With gradients and unit twice as large in the second step, the sums are twice as large, to the bit."""

    def body(communicator: HostCommunicator) -> list[Any]:
        found = []
        for unit in (1.0, 2.0):
            reducer = CompressedReducer(TopK(0.01))
            sums(reducer, communicator, gradients(communicator.rank, 0), [1.0] * 3)
            arrays = [array * np.float32(unit) for array in gradients(communicator.rank, 1)]
            found.append(sums(reducer, communicator, arrays, [1.0] * 3, unit=unit))
        return found

    for plain, doubled in on_ranks(body):
        for a, b in zip(plain, doubled, strict=True):
            np.testing.assert_array_equal(2 * a, b)


def test_a_failed_step_may_be_repeated_and_a_saved_one_goes_on() -> None:
    def body(communicator: HostCommunicator) -> bool:
        straight, repeated = CompressedReducer(PowerSGD(2)), CompressedReducer(PowerSGD(2))
        shapes = SHAPES[:2]
        for step in range(3):
            arrays = gradients(communicator.rank, step, shapes)
            expected = sums(straight, communicator, arrays, [1.0, 1.0])
            # Fails after its collectives, before it is committed.
            repeated.all_reduce(communicator, arrays, [1.0, 1.0], [np.empty_like(a) for a in arrays])
            state = repeated.state()
            repeated = CompressedReducer(PowerSGD(2))
            repeated.load({name: np.array(array) for name, array in state.items()})
            found = sums(repeated, communicator, arrays, [1.0, 1.0])
            if any(a.tobytes() != b.tobytes() for a, b in zip(expected, found, strict=True)):
                return False
        return True

    assert on_ranks(body, 2) == [True, True]


def test_a_rank_that_joins_is_given_what_all_have_in_common() -> None:
    """Ranks 0 and 1 have gone on without rank 2, which then takes part: all have the same bits."""

    def body(communicator: HostCommunicator) -> Any:
        reducer = CompressedReducer(PowerSGD(2))
        shapes = SHAPES[:1]
        sums(reducer, communicator, gradients(communicator.rank, 0, shapes), [1.0])
        if communicator.rank == 2:
            reducer = CompressedReducer(PowerSGD(2))
        reducer.synchronize(communicator)
        return sums(reducer, communicator, gradients(communicator.rank, 1, shapes), [1.0])[0].tobytes()

    assert len(set(on_ranks(body))) == 1


def test_lists_of_the_same_shapes_are_told_apart_also_after_a_resumption() -> None:
    """Two optimizers of one step."""

    def body(communicator: HostCommunicator) -> bool:
        first, second, resumed = (CompressedReducer(PowerSGD(2)) for _ in range(3))
        shapes = SHAPES[:2]
        for step in range(4):
            if step == 2:
                resumed.load({name: np.array(array) for name, array in first.state().items()})
            for number in range(2):
                arrays = gradients(communicator.rank, 2 * step + number, shapes)
                both = [first, resumed] if step >= 2 else [first]
                found = [sums(each, communicator, arrays, [1.0, 1.0], owner=id(each) + number) for each in both]
                if number == 1:  # as if it were the only one
                    found.append(sums(second, communicator, arrays, [1.0, 1.0]))
                if any(a.tobytes() != b.tobytes() for each in found for a, b in zip(found[0], each, strict=True)):
                    return False
        return True

    assert on_ranks(body, 2) == [True, True]


def test_bytes_are_counted() -> None:
    """Half the bytes with 16 bits, a quarter with 8, and a fraction with factors or few values."""

    def body(communicator: HostCommunicator) -> dict[str, int]:
        found = {}
        for name in ("", *NAMES):
            before = communicator.statistics.bytes_sent
            arrays = [np.ones((512, 512), np.float32)]
            if name:
                sums(CompressedReducer(resolve(name)), communicator, arrays, [1.0])
            else:
                communicator.all_reduce(arrays)
            found[name] = communicator.statistics.bytes_sent - before
        return found

    for sent in on_ranks(body, 2):
        whole = 4 * 512 * 512
        assert sent[""] >= whole
        assert sent["float16"] == pytest.approx(sent["bfloat16"], rel=0.01)
        # Through shared memory a rank writes what it reduces once; 16 and 8 bits are scattered and gathered.
        assert sent["float16"] < 0.8 * whole
        assert sent["int8"] < 0.4 * whole
        assert sent["int6"] < 0.3 * whole
        assert sent["int4"] < 0.2 * whole
        assert sent["top_k"] < 0.17 * whole
        assert sent["power_sgd"] < 0.05 * whole


def test_a_codec_that_decodes_to_something_else_is_told() -> None:
    class Wrong(Codec):
        def encode(self, array: Any) -> Sequence[Any]:
            return [array]

        def decode(self, parts: Sequence[Any], size: int) -> Any:
            return parts[0].astype(np.float64)

    def body(communicator: HostCommunicator) -> None:
        sums(CompressedReducer(Wrong()), communicator, gradients(0), [1.0] * 3)

    with pytest.raises(ConfigurationError, match=r"Wrong.decode returned float64 of shape \(6144,\)"):
        on_ranks(body, 2)


@pytest.mark.parametrize("wrong", ["fp16", 8, TopK, object()])
def test_what_is_no_compression_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="'power_sgd'"):
        resolve(wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: compression.TopK(0.0),
        lambda: compression.TopK(1.5),
        lambda: compression.TopK(values="int8"),
        lambda: compression.Int8(0),
        lambda: compression.Int6(6),
        lambda: compression.Int4(3),
        lambda: compression.PowerSGD(factors="int8"),
        lambda: compression.PowerSGD(0),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_small_arrays_and_narrow_ones_are_left_alone() -> None:
    floats = np.dtype(np.float32)
    assert not resolve("int8").takes((100,), floats)
    assert not resolve("float16").takes((4096,), np.dtype(np.float16))
