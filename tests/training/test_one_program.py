"""One compiled program on four CPU devices trains the model that plain Keras trains on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.compare import assert_close
from tests.training.jobs import run_scenarios
from tests.training.replicas_are_one import shared_values
from tests.training.scenarios import SCENARIOS

TABLE = "tests.training.scenarios"
BOUND_S = 1200

QUICK = [
    "batch_normalization_over_all_replicas",
    "two_optimizers_on_jax",
    "saved_while_gradients_accumulate",
    "what_steps_get_of_single_batches",
]
MORE = [
    "masked_sequences_with_sample_weight",
    "loss_that_relates_samples_with_a_mask",
    "single_batches",
    "own_train_step_and_test_step",
    "mixed_float16",
    "swap_ema_weights",
    "several_inputs_and_outputs",
]

OF_RANKS = {
    "dropout_differs_between_ranks_on_the_same_start",
    "pipelines_of_two_ranks_merge_as_one_batch",
    "pipelines_of_three_ranks_merge_as_one_batch",
}
"""They say what ranks do, of which there is one here."""
TOO_SMALL = {
    "a_rank_whose_samples_are_all_masked",
    "layer_used_twice_and_embedding",
    "masked_sequences_with_a_loss_of_the_program",
}
"""No variable of their models can be divided."""
ALL = [
    s.name for s in SCENARIOS.values() if "jax" in s.backends and s.has_reference and s.name not in OF_RANKS | TOO_SMALL
]

pytestmark = [pytest.mark.jax, pytest.mark.timeout(BOUND_S)]


def check(folder: Path, kind: str, names: list[str]) -> None:
    """All of these scenarios, each compared with plain Keras."""
    plain = run_scenarios(folder / "plain", TABLE, "jax", 1, names)
    found = run_scenarios(folder / kind, TABLE, "jax", 1, names, kind)
    wrong = []
    for name in names:
        try:
            ours, theirs = (shared_values(findings.of(name)[0], name) for findings in (found, plain))
            assert_close(ours, theirs, SCENARIOS[name].tolerance)
        except (AssertionError, pytest.fail.Exception) as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n\n".join(wrong)


def test_sharded_weights_train_as_one_device(tmp_path: Path) -> None:
    check(tmp_path, "sharded-3", QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mirrored", "sharded-1", "sharded-2", "model-parallel"])
def test_each_placement_trains_as_one_device(kind: str, tmp_path: Path) -> None:
    check(tmp_path, kind, QUICK + MORE)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_all_scenarios_train_as_on_one_device(part: int, tmp_path: Path) -> None:
    check(tmp_path, "sharded-3", ALL[part::8])
