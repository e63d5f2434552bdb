"""Setup of a `fit` on all replicas: checks that they were passed the same, and decides who does what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import keras

from phalanx.checkpoint.backup_and_restore import saves_mid_epoch
from phalanx.data import ShardedInput, accepts_batch_size
from phalanx.keras_compat.model_state import overrides
from phalanx.training import callback_hooks, saver_claims
from phalanx.training.checkpointing import FitCheckpointing
from phalanx.training.checks.model_checks import check_clipping
from phalanx.training.checks.same_program import check_same_configuration, compare_inputs, compare_samples
from phalanx.training.elastic_recovery import ElasticRecovery, build_fit_callbacks
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.fit_position import FitRecorder
from phalanx.training.fit_resumption import FitResumption
from phalanx.training.fit_state import ReplicaFitState
from phalanx.training.replica import divides_batches, seed_from_program
from phalanx.training.replica_model import ReplicaModel

T = TypeVar("T")


@dataclass(frozen=True)
class ReplicaFit:
    """One call of `fit` on one replica, and its collaborators.

    Attributes:
        model: This rank's copy of the model.
        state: State of the `fit`.
        recorder: Records positions, so that another process may continue this `fit`.
        recovery: Follows the membership in elastic jobs; otherwise None.
        checkpointing: Restores and saves, if `fit` was passed a `Checkpoint`; otherwise None.
    """

    model: ReplicaModel
    state: ReplicaFitState
    recorder: FitRecorder
    recovery: ElasticRecovery | None = None
    checkpointing: FitCheckpointing | None = None

    def retry(self, action: Callable[[], T]) -> T:
        """Run a collective action of all ranks, and restart it whenever the membership changes."""
        return action() if self.recovery is None else self.recovery.retry(action)


def prepare_fit(replica_model: ReplicaModel, arguments: FitArguments, resumption: FitResumption | None) -> ReplicaFit:
    """Compare what the ranks were passed, and create engine, stepper and callbacks.

    Args:
        resumption: Checkpoints of this `fit`, if it was passed a `Checkpoint`.

    Raises: DisagreementError if the ranks were passed different data or arguments; see `RankComparison`.
    """
    # Invariant from here to the end of `fit`: all ranks go through the same collectives in the same order. A decision
    # that depends on what one rank was passed is itself a collective (`any_rank`), never an `if` on that rank.
    replica, model = replica_model.replica, replica_model.model
    if replica.mesh_parts is not None and replica_model.policy.placement is not None:
        saver_claims.refuse_divided(arguments.callbacks, replica_model.policy.placement)
    fit = _begin_fit(replica_model, arguments, resumption)
    state, retry, recovery = fit.state, fit.retry, fit.recovery
    # After what every method does first, so that ranks that call different methods notice it here; and before the
    # validation data are read, which one of them may lack.
    retry(lambda: check_same_configuration(model, arguments, replica))
    if arguments.validation_data is not None:
        state.validation = validation = _shard_validation_data(replica_model, arguments)
        retry(lambda: compare_inputs(validation, replica, "fit"))
        retry(lambda: compare_samples(validation, replica))
    replica_model.prepare(state.source, "fit", validation=state.validation)
    state.source.read_first()

    def any_rank(flag: bool) -> bool:
        return retry(lambda: replica.any(flag))

    saves = callback_hooks.needs_whole_optimizer(arguments.callbacks)  # perhaps on the chief alone
    reads = callback_hooks.may_read_optimizer(arguments.callbacks)
    repeats = resumption is not None or any_rank(saves)
    state.stepper = replica_model.stepper(repeats=repeats, accumulates=not any_rank(reads))
    if recovery is not None:
        recovery.adapt_if_changed()  # building the model may have met a membership change
    retry(lambda: compare_samples(state.source, replica))
    replica_model.announce_sharding(state.source, arguments.verbose)
    state.has_batch_listeners = any_rank(callback_hooks.has_batch_hooks(arguments.callbacks, "train"))
    state.has_validation_batch_listeners = any_rank(callback_hooks.has_batch_hooks(arguments.callbacks, "test"))
    state.chief_adds_logs = any_rank(callback_hooks.chief_may_add_logs(arguments.callbacks))
    try:
        build_fit_callbacks(replica_model, state, arguments.callbacks)
        fit.recorder.track_callbacks()
        if overrides(model, "train_step") and state.stepper.merges_every_step and divides_batches(replica):
            check_clipping(model)
    except BaseException:  # a lost peer, Ctrl-C: the callbacks belong to the program again
        state.exit_stack.close()
        raise
    return fit


def _begin_fit(replica_model: ReplicaModel, arguments: FitArguments, resumption: FitResumption | None) -> ReplicaFit:
    """Create the fit with its input, which an elastic job may have to divide again from here on."""
    elastic = replica_model.replica.elastic
    source = shard_training_data(replica_model, arguments, _shuffle_seed(replica_model, arguments, resumption))
    state = ReplicaFitState(arguments=arguments, source=source)
    recorder = FitRecorder(replica_model, state, is_continuable=elastic is not None or resumption is not None)
    recovery = None if elastic is None else ElasticRecovery(replica_model, elastic, state, recorder)
    fit = ReplicaFit(replica_model, state, recorder, recovery)
    if resumption is None:
        return fit
    return replace(fit, checkpointing=FitCheckpointing(replica_model, state, recorder, resumption, fit.retry))


def shard_training_data(replica_model: ReplicaModel, arguments: FitArguments, seed: int | None) -> ShardedInput:
    """Return this rank's part of the training data of `fit`.

    Args:
        seed: Seed of the sample orders; None if the source draws them.
    """
    return replica_model.shard(
        arguments.x,
        arguments.y,
        arguments.sample_weight,
        batch_size=arguments.batch_size,
        steps=arguments.steps_per_epoch,
        shuffle=arguments.shuffle,
        class_weight=arguments.class_weight,
        seed=seed,
    )


def _shuffle_seed(replica_model: ReplicaModel, arguments: FitArguments, resumption: FitResumption | None) -> int | None:
    """Return the seed of the sample orders, if a process that resumes in the middle must draw them again."""
    replica = replica_model.replica
    if replica.elastic is not None:
        return None  # the entry's
    if resumption is not None:
        return resumption.common_seed()
    return int(replica.broadcast_from_chief(seed_from_program())) if saves_mid_epoch(arguments.callbacks) else None


def _shard_validation_data(replica_model: ReplicaModel, arguments: FitArguments) -> ShardedInput:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(arguments.validation_data)
    batch_size = arguments.validation_batch_size
    if batch_size is None and accepts_batch_size(x):
        batch_size = arguments.batch_size
    validation = replica_model.shard(x, y, weight, batch_size=batch_size, steps=arguments.validation_steps)
    validation.may_be_empty = True
    return validation
