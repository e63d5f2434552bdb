"""What CI runs of the two suites whose tests start jobs: training scenarios and examples.

Of the scenarios those that each stand for a kind of their own, on every backend where that can differ; of the examples
and pages, the demo and the links; of the strategy interface everything, with two ranks. All others are marked slow:
starting a job and compiling its models takes seconds for each. `make test-slow` runs them.
"""

from __future__ import annotations

import os

import hypothesis
import pytest

from tests.support.backends import BACKENDS, FIRST

# The tests themselves use Keras a little, on any backend there is; jobs are told theirs.
os.environ.setdefault("KERAS_BACKEND", FIRST)

# The same examples in each run; how long one takes says nothing on a busy machine.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

CI_SCENARIOS = """
    sequential_adam functional_sgd_momentum_sample_weight subclassed_adam_class_weight several_inputs_and_outputs
    batch_normalisation_trains_and_ranks_agree batch_normalization_over_all_replicas
    dropout_differs_between_ranks_on_the_same_start loss_reduction_sum masked_sequences_labelled_by_token
    metrics_of_two_classes own_train_step_and_test_step own_train_step_that_counts_steps means_of_steps
    optimizer_global_clipnorm optimizer_gradient_accumulation optimizer_loss_scale steps_per_execution
    own_test_step_whose_last_batch_is_small dropout_without_a_seed_differs_between_ranks strings
    early_stopping_restores_the_best one_rank_stops_all only_the_chief_writes backup_resumes_exactly
    non_chiefs_print_nothing model_of_other_width_on_one_rank other_length_of_data_on_one_rank
    other_initial_weights_are_the_chiefs learning_rate_set_at_batches_by_the_chief_alone
    validation_split shuffled_arrays tf_dataset py_dataset data_loader generator fewer_samples_than_replicas
    single_batches predict_without_compile two_optimizers two_optimizers_in_a_model_without_call
    weights_after_the_update_inside_the_step data_in_another_order_on_one_rank only_the_chief_shows_the_evaluation
    weights_that_the_chief_alone_sets_are_everybodys learning_rate_set_by_the_chief_alone_under_loss_scaling
    optimizer_of_a_model_inside other_subset_of_a_data_loader_on_one_rank
    predictions_of_random_layers_differ modules_of_pytorch_among_the_layers steps_per_execution_on_torch
    top_k_of_all_is_exact compressed_alike_on_all_ranks accumulated accumulating_meets_once_per_update
    sharing_adam sharing_again sharing_normalisation sharing_only_where_all_ranks_may sharing_not_without_memory
    sharing_shows_what_all_have_counted sharing_broken_off sharing_ends_where_gradients_are_missing
    sharing_ends_in_the_middle
    local_sgd_recomputed diloco_overlapped_recomputed streams_of_unequal_length diloco_sends_little
    ranks_without_data_do_not_count overflow_on_one_rank_int8
"""
CI_SCENARIOS_OF_THREE_RANKS = """
    sequential_adam functional_sgd_momentum_sample_weight subclassed_adam_class_weight fewer_samples_than_replicas
"""


CI_SCENARIOS_OF_ONE_BACKEND = """
    own_train_step_that_counts_steps backup_resumes_exactly one_rank_stops_all only_the_chief_writes
    non_chiefs_print_nothing other_length_of_data_on_one_rank learning_rate_set_at_batches_by_the_chief_alone
    py_dataset generator validation_split data_in_another_order_on_one_rank only_the_chief_shows_the_evaluation
    weights_that_the_chief_alone_sets_are_everybodys other_subset_of_a_data_loader_on_one_rank
    top_k_of_all_is_exact diloco_overlapped_recomputed
    streams_of_unequal_length ranks_without_data_do_not_count
    early_stopping_restores_the_best model_of_other_width_on_one_rank other_initial_weights_are_the_chiefs
    learning_rate_set_by_the_chief_alone_under_loss_scaling shuffled_arrays tf_dataset data_loader
    diloco_sends_little overflow_on_one_rank_int8
"""
"""Of those above: what they are about lies in code that is the same for all backends. They run on the one that compiles
nothing, if it is there."""
ONE_BACKEND = "torch" if "torch" in BACKENDS else FIRST


CI_SERVER_CASES = "alone_in_pieces_clipped alone_with_own_train_step synchronous_in_pieces_clipped asynchronous"
SLOW_SERVER_CASES = "asynchronous_in_bfloat16 asynchronous_with_a_schedule asynchronous_looked_at alone_in_float64"
"""Another case, exact or in another way, runs the same code."""


CI_ON_ONE_BACKEND = (
    "tests/parameter_server/test_alike.py",
    "test_five_kills_at_random_moments",
    "test_a_job_that_lost_a_worker_is_started_again_as_a_whole",
)
"""Parts of the names of tests that start jobs on each backend, though what they are about is the same for all."""


CI_EXAMPLES = (
    "test_digits_reach_97_percent_on_two_replicas[jax]",
    "test_digits_with_a_parameter_server_reach_96_percent[jax]",
    "test_links_lead_to_files",
    "test_every_example_is_named_in_the_readme",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_for_later(item):
            item.add_marker(pytest.mark.slow)


def _is_for_later(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    on_first = parameters.get("backend", FIRST) == FIRST
    if "/examples/" in str(item.path):
        return not item.name.startswith(CI_EXAMPLES)
    if "/parameter_server/test_training" in str(item.path):
        name = parameters["name"]
        return name in SLOW_SERVER_CASES.split() if on_first else name not in CI_SERVER_CASES.split()
    if {"backend", "world_size", "scenario"} <= parameters.keys():
        of_two = parameters["world_size"] == 2
        if of_two and "/strategies/" in str(item.path):
            return False
        chosen = CI_SCENARIOS if of_two else CI_SCENARIOS_OF_THREE_RANKS
        if of_two and parameters["scenario"] in CI_SCENARIOS_OF_ONE_BACKEND.split():
            return parameters["scenario"] not in chosen.split() or parameters["backend"] != ONE_BACKEND
        return parameters["scenario"] not in chosen.split() or not (on_first or of_two)
    return not on_first and any(part in item.nodeid for part in CI_ON_ONE_BACKEND)
