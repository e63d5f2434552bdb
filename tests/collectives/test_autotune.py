"""Tuned all-reduces: the same sums, the same choices on all ranks, and what was chosen is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.cluster.membership import Membership
from phalanx.collectives import CommunicationOptions, connect
from phalanx.collectives.autotune.autotuned_algorithm import LEAST_BYTES, AutotunedAlgorithm
from phalanx.config.job_config import CollectiveConfig
from phalanx.errors import DisagreementError
from tests.support.processes import run_ranks, values

CALLS = 90
"""More than the search takes: 2 algorithms, 4 chunk sizes and the last round, and the calls that do not count."""


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "a", "b")], ids=["shared memory", "hierarchical"])
def test_ranks_choose_alike_and_sums_stay_right(hosts: tuple[str, ...], tmp_path: Path) -> None:
    def body(membership: Membership) -> Any:
        with connect(
            membership,
            CommunicationOptions(timeout_seconds=50.0),
            config=CollectiveConfig(autotune=True, autotune_log=tmp_path / "log"),
        ) as communicator:
            for call in range(CALLS):
                arrays = [np.full(size, membership.rank + call, np.float32) for size in (100_000, 7, 3000)]
                merged = communicator.all_reduce(arrays)
                expected = sum(rank + call for rank in range(len(hosts)))
                assert all((array == expected).all() for array in merged)
            communicator.barrier()
            algorithm = communicator.runner.algorithm
            assert isinstance(algorithm, AutotunedAlgorithm)
            (search,) = algorithm._searches.values()
            return search.choice, [tuple(tried) for tried in search.results]

    found = values(run_ranks(body, hosts=hosts))
    assert found[0][0] is not None
    assert all(each == found[0] for each in found)
    default = "shared memory" if len(hosts) == 2 else "hierarchical"
    assert {plan.algorithm for plan, _ in found[0][1]} == {"ring", default}
    log = (tmp_path / "log").read_text()
    assert f"chosen: {found[0][0]}" in log
    assert log.count("\n") == len(found[0][1]) + 2


def test_small_calls_are_not_tuned() -> None:
    def body(membership: Membership) -> Any:
        with connect(
            membership, CommunicationOptions(timeout_seconds=50.0), config=CollectiveConfig(autotune=True)
        ) as communicator:
            for _ in range(5):
                communicator.all_reduce([np.ones(LEAST_BYTES // 8 - 1)])
            return len(communicator.runner.algorithm._searches)  # type: ignore[attr-defined]

    assert values(run_ranks(body, 2)) == [0, 0]


def test_ranks_of_which_one_tunes_disagree() -> None:
    def body(membership: Membership) -> None:
        connect(
            membership,
            CommunicationOptions(timeout_seconds=50.0),
            config=CollectiveConfig(autotune=membership.rank == 1),
        )

    for outcome in run_ranks(body, 2):
        assert isinstance(outcome.error, DisagreementError)
        assert "autotune" in str(outcome.error)
