"""The interface in real jobs, in the manner of Horovod's own parallel tests: one test for each case and job size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.horovod.conftest import BOUND_S, names_of
from tests.horovod.worker import SKIPPED
from tests.support.backends import BACKENDS

JOBS = [
    ("numpy", "numpy", 4, False),
    ("numpy", "numpy", 3, True),
    ("torch", "torch", 2, False),
    ("torch", "torch", 3, True),
    ("tensorflow", "tensorflow", 2, False),
    ("tensorflow", "tensorflow", 3, True),
    ("jax", "jax", 2, False),
    *(("keras", backend, 2, False) for backend in BACKENDS),
]
"""Framework, Keras backend, ranks, whether only the slow tests run it."""

OF_KERAS_IN_A_GRAPH = frozenset(
    {
        "check_fit_trains_as_one_process_on_the_global_batches",
        "check_backward_passes_per_step",
        "check_loss_scaling_takes_the_same_decisions_on_every_rank",
        "check_loops_of_ones_own",
        "check_functions_of_tensors",
        "check_sync_batch_normalization_trains_as_one_process",
    }
)
"""What has code of its own in a graph. The other cases take the path that PyTorch takes, and are slow elsewhere."""

OF_KERAS_ON_JAX = OF_KERAS_IN_A_GRAPH | {
    "check_batches_one_by_one_and_own_metrics",
    "check_several_steps_in_one_execution",
}
"""On JAX the state of a step goes in and out in these as well."""

QUICK_CASES_OF_KERAS = {"tensorflow": OF_KERAS_IN_A_GRAPH, "jax": OF_KERAS_ON_JAX}


def _parameters() -> list[Any]:
    return [
        pytest.param(
            framework,
            backend,
            size,
            name,
            id=f"{framework}-{backend}-{size}-{name.removeprefix('check_')}",
            marks=[pytest.mark.slow] if slow or _is_as_on_pytorch(framework, backend, name) else [],
        )
        for framework, backend, size, slow in JOBS
        if framework == "numpy" or backend in BACKENDS
        for name in names_of(framework)
    ]


def _is_as_on_pytorch(framework: str, backend: str, case: str) -> bool:
    return framework == "keras" and backend in QUICK_CASES_OF_KERAS and case not in QUICK_CASES_OF_KERAS[backend]


@pytest.mark.timeout(BOUND_S + 30)
@pytest.mark.parametrize(("framework", "backend", "world_size", "case"), _parameters())
def test_case(
    framework: str, backend: str, world_size: int, case: str, outcomes: Callable[[str, str, int], Any]
) -> None:
    found, output = outcomes(framework, backend, world_size)
    assert case in found, f"the job did not come to this case; it said:\n{output[-6000:]}"
    if all(text.startswith(SKIPPED) for text in found[case]):
        pytest.skip(found[case][0].removeprefix(SKIPPED))
    for rank, traceback in enumerate(found[case]):
        assert not traceback, f"rank {rank}:\n{traceback}"
