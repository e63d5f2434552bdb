"""The algorithms with tf.distribute's names, and its options."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import phalanx.collectives as collectives
from phalanx.cluster.membership import Membership
from phalanx.collectives import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReduceOp,
    ReductionToOneDevice,
    connect,
)
from phalanx.collectives.cross_device_ops import cross_device_ops_of
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.collectives.options import DEFAULT_TIMEOUT_S
from phalanx.errors import CollectiveMismatchError, ConfigurationError
from tests.collectives.kinds import KINDS, Kind
from tests.support.processes import run_threads

kinds = pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind.name in ("single", "shared3-file", "ring3", "hierarchical-even")],
    ids=lambda kind: kind.name,
)

EXPORTED = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Communicator",
    "CrossDeviceOps",
    "Handle",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReduceOp",
    "ReductionToOneDevice",
    "connect",
]


def test_the_public_names_change_only_on_purpose() -> None:
    assert sorted(collectives.__all__) == EXPORTED
    assert all(hasattr(collectives, name) for name in EXPORTED)


@kinds
@pytest.mark.parametrize(
    "ops",
    [HierarchicalCopyAllReduce(), HierarchicalCopyAllReduce(num_packs=2), ReductionToOneDevice()],
    ids=["copy", "copy-packs", "one-device"],
)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX])
def test_every_algorithm_merges_the_same(kind: Kind, ops: CrossDeviceOps, op: ReduceOp) -> None:
    def body(communicator: HostCommunicator) -> list[np.ndarray]:
        r = communicator.rank + 1.0
        arrays = [np.full((4, 3), r, np.float32), np.array(r), np.full(5, r, ml_dtypes.bfloat16)]
        return ops.all_reduce(communicator, arrays, op, scale=2.0 if op is ReduceOp.SUM else 1.0)

    n = kind.world_size
    total = n * (n + 1) / 2
    exact = {ReduceOp.SUM: 2 * total, ReduceOp.MEAN: total / n, ReduceOp.MAX: n}[op]
    for merged in kind.run(body):
        assert [array.shape for array in merged] == [(4, 3), (), (5,)]
        assert all((array == exact).all() for array in merged)


@kinds
def test_reduction_to_one_device_merges_with_the_user_s_function_on_the_rank_named(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> list[float]:
        last = communicator.world_size - 1
        seen = []

        def median(rows: list[np.ndarray]) -> np.ndarray:
            seen.append(communicator.rank)
            return np.median(rows, axis=0)

        ops = ReductionToOneDevice(f"cpu:{last}", median)
        (merged,) = ops.all_reduce(communicator, [np.full(3, float(communicator.rank**2))])
        assert seen == ([last] if communicator.rank == last else [])
        return merged.tolist()

    exact = float(np.median([rank**2 for rank in range(kind.world_size)]))
    assert kind.run(body) == [[exact] * 3] * kind.world_size


@kinds
def test_one_device_takes_what_a_communicator_takes(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> bool:
        arrays = [np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)), np.full(3, 10), np.ones(2, ">f4")]
        ops = ReductionToOneDevice()
        for merged, exact in zip(
            ops.all_reduce(communicator, arrays, scale=0.5), communicator.all_reduce(arrays, scale=0.5), strict=True
        ):
            np.testing.assert_array_equal(merged, exact)
        with pytest.raises(ConfigurationError, match="scale needs op SUM"):
            ops.all_reduce(communicator, arrays, ReduceOp.MAX, scale=0.5)
        return True

    assert all(kind.run(body))


@kinds
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_one_device_rounds_narrow_floats_once(kind: Kind, dtype: Any) -> None:
    """As the other algorithms do: not what a factor makes of each rank's part, which may be too large for the dtype."""

    def body(communicator: HostCommunicator) -> bool:
        largest = float(ml_dtypes.finfo(dtype).max)
        sign = 1 if communicator.rank % 2 == 0 else -1
        values = np.array([1.0, 0.3, -2.7, sign * 0.75 * largest], np.float32).astype(dtype)
        (expected,) = communicator.all_reduce([values], scale=1.7)
        (found,) = ReductionToOneDevice().all_reduce(communicator, [values], scale=1.7)
        return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()

    assert all(kind.run(body))


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be a rank"):
        ReductionToOneDevice("the big one")
    with pytest.raises(ConfigurationError, match="num_packs"):
        HierarchicalCopyAllReduce(num_packs=-1)
    with pytest.raises(ConfigurationError, match="needs GPUs"):
        NcclAllReduce()


def test_a_class_stands_for_its_object() -> None:
    assert isinstance(cross_device_ops_of(HierarchicalCopyAllReduce), HierarchicalCopyAllReduce)
    assert isinstance(cross_device_ops_of(ReductionToOneDevice), ReductionToOneDevice)
    with pytest.raises(ConfigurationError, match="needs GPUs"):
        cross_device_ops_of(NcclAllReduce)
    with pytest.raises(ConfigurationError, match="it must be"):
        cross_device_ops_of(dict)


@kinds
def test_a_device_that_is_no_rank_of_the_job_is_refused(kind: Kind) -> None:
    def body(communicator: HostCommunicator) -> bool:
        with pytest.raises(ConfigurationError, match="ranks 0 to"):
            ReductionToOneDevice(99).all_reduce(communicator, [np.ones(1)])
        with pytest.raises(ConfigurationError, match="stands for the sum"):
            ReductionToOneDevice(None, sum).all_reduce(communicator, [np.ones(1)], ReduceOp.MAX)
        return True

    assert all(kind.run(body))


def test_options_are_those_of_tf_distribute() -> None:
    options = CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is CommunicationImplementation.AUTO
    assert options.timeout_s == DEFAULT_TIMEOUT_S
    assert CollectiveCommunication.RING is CommunicationImplementation.RING
    assert CollectiveHints(50 * 1024 * 1024, 120.0).timeout_s == 120.0
    assert CommunicationOptions(implementation="ring").implementation is CommunicationImplementation.RING  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"bytes_per_pack": -1}, "number of bytes"),
        ({"bytes_per_pack": 0.5}, "number of bytes"),
        ({"bytes_per_pack": float("inf")}, "number of bytes"),
        ({"timeout_seconds": 0}, "greater than 0"),
        ({"timeout_seconds": float("nan")}, "greater than 0"),
        ({"implementation": "tree"}, "CommunicationImplementation.RING"),
    ],
)
def test_wrong_options_say_what_to_write(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        CommunicationOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [1e6, np.int64(10**6)])
def test_a_number_of_bytes_may_be_of_any_numeric_type(given: Any) -> None:
    def body(membership: Membership) -> float:
        with connect(membership, CommunicationOptions(bytes_per_pack=given)) as communicator:
            return float(communicator.all_reduce([np.ones(100_000, np.float32)])[0][0])

    assert run_threads(body, hosts=["a", "b"]) == [2.0, 2.0]


@pytest.mark.parametrize("what", ["shape", "dtype", "op"])
@kinds
def test_ranks_that_ask_one_device_for_different_things_are_told(kind: Kind, what: str) -> None:
    def body(communicator: HostCommunicator) -> str:
        odd = communicator.rank == communicator.world_size - 1
        array = np.ones(3 if odd and what == "shape" else 2, np.float64 if odd and what == "dtype" else np.float32)
        op = ReduceOp.MAX if odd and what == "op" else ReduceOp.SUM
        try:
            ReductionToOneDevice().all_reduce(communicator, [array], op)
        except CollectiveMismatchError as error:
            return str(error)
        return "nothing is wrong"

    said = set(kind.run(body))
    assert len(said) == 1
    last = kind.world_size - 1
    assert (f"rank {last} called it with" in said.pop()) == (last > 0)
