"""Every cell of the table "Backends and limits" is covered by a test, or says that it is not tested."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from tests.support.commands import ROOT
from tests.training.scenarios.registry import BACKENDS

PAGE = ROOT / "docs/reference/backends.md"
NOT_TESTED = "not tested"
TABLES = {"training": "tests.training.scenarios", "compression": "tests.compression.scenarios"}

COVERED_BY = {
    "`fit`, `evaluate`": ["training: sequential_adam evaluate_and_predict_steps single_batches"],
    "NumPy, pandas": ["training: sequential_adam pandas_frame py_dataset generator tf_dataset data_loader"],
    "custom `compute_loss`": ["training: own_compute_loss own_compute_metrics"],
    "custom `train_step`": ["training: own_train_step_and_test_step own_train_step_that_updates_by_itself_on_jax"],
    "several optimizers": ["training: two_optimizers_on_jax two_optimizers_in_a_model_without_call two_optimizers"],
    "`mixed_float16`": ["training: mixed_float16 mixed_bfloat16"],
    "gradient accumulation": [
        "training: embeddings_with_accumulated_gradients optimizer_accumulates_over_an_overflow",
        "training: swap_ema_weights optimizer_loss_scale_overflows embeddings_run_eagerly_with_clipped_gradients",
    ],
    "`run_eagerly=True`": ["training: run_eagerly"],
    "`jit_compile=True`": ["training: jit_compiled jit_compiled_by_inductor"],
    "`steps_per_execution`": ["training: steps_per_execution steps_per_execution_on_torch"],
    "[`ParameterServerStrategy`]": [
        "tests/parameter_server/test_training.py::test_the_numbers_are_those_of_one_process",
        "tests/parameter_server/test_mixed.py::test_workers_on_two_backends_train_as_those_on_one",
    ],
    "[`ClusterCoordinator`]": ["tests/coordinator/test_jobs.py::test_one_worker_trains_as_one_process"],
    "[`CentralStorageStrategy`]": [
        "tests/strategies/test_mirrored_strategy.py::test_central_storage_trains_as_one_process"
    ],
    "[supervisor]": [
        "tests/supervisor/test_jobs.py::test_an_evaluator_evaluates_each_checkpoint_once_and_ends_with_the_job"
    ],
    "[elastic training]": ["tests/elastic/test_jobs.py::test_losses_change_no_bit_of_deterministic_training"],
    "[exact resume, preemption]": ["tests/training/test_resuming.py::test_everything_killed_and_started_again"],
    "[gradient compression]": ["compression: compressed_alike_on_all_ranks local_sgd_every_step_is_synchronous"],
    "[timeline]": ["tests/training/test_timeline.py::test_all_ranks_are_in_one_file_with_the_parts_of_each_step"],
    "[Horovod's interface]": ["tests/horovod/test_parallel.py::test_case"],
    "[custom training loop]": [
        "tests/examples/test_examples.py::test_custom_loops_learn_the_same_on_one_replica_and_on_two"
    ],
    "[models divided over devices]": [
        "tests/strategies/test_divided_strategies.py::test_other_backends_are_refused_with_the_remedy",
        "tests/training/test_one_program.py::test_sharded_weights_train_as_one_device",
    ],
    "a loss with `reduction": ["training: loss_without_reduction"],
    "[batch normalization over": ["training: batch_normalization_over_all_replicas"],
}
"""What tests each row, by how it begins: scenarios of a table, or test functions."""


def _rows() -> dict[str, list[str]]:
    lines = PAGE.read_text().partition("## Limits")[0].splitlines()
    _, *rows = [
        re.split(r" *(?<!\\)\| *", line.strip("| ")) for line in lines if line.startswith("| ") and "---" not in line
    ]
    return {first: cells for first, *cells in rows}


def _rows_of_the_map() -> dict[str, str]:
    """The beginning of a row in the map, by the row."""
    return {row: beginning for row in _rows() for beginning in COVERED_BY if row.startswith(beginning)}


def _covered(reference: str) -> set[str]:
    """The backends on which something runs that `COVERED_BY` names; an assertion that it exists."""
    if "::" not in reference:
        table, _, names = reference.partition(": ")
        scenarios = importlib.import_module(TABLES[table]).SCENARIOS
        return set().union(*(scenarios[name].backends for name in names.split()))
    path, name = reference.split("::")
    tree = ast.parse((ROOT / path).read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    arguments = {argument.arg for argument in function.args.args}
    text = " ".join(map(ast.unparse, function.decorator_list)) + ast.unparse(function)
    named = {backend for backend in BACKENDS if re.search(rf"\b{backend}\b", text)}
    return set(BACKENDS) if "backend" in arguments else named


def test_every_row_is_in_the_map_and_nothing_else() -> None:
    assert list(_rows_of_the_map()) == list(_rows())
    assert set(_rows_of_the_map().values()) == set(COVERED_BY)


@pytest.mark.parametrize("beginning", COVERED_BY)
def test_every_cell_is_covered_or_says_so(beginning: str) -> None:
    (cells,) = [cells for row, cells in _rows().items() if row.startswith(beginning)]
    covered = set().union(*map(_covered, COVERED_BY[beginning]))
    missing = [
        name for name, cell in zip(BACKENDS, cells, strict=True) if name not in covered and NOT_TESTED not in cell
    ]
    assert not missing, f"no test covers {beginning} on {missing}"
