"""`evaluate`: metrics of one pass over a dataset, by all replicas together or by one parameter-server worker.

Each replica adds its own batches to its metrics. They are merged at the end, from a common start that counts once.
Metrics that weight each batch by their own shares, and micro-batches, are merged after every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from phalanx.collectives.communicator import Array
from phalanx.data import ShardedInput
from phalanx.errors import MembershipChangedError
from phalanx.keras_compat.keras_internals import pythonify_logs
from phalanx.keras_compat.model_state import set_mode
from phalanx.monitoring import timeline
from phalanx.runtime import progress
from phalanx.training import progress_bar
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.joint_batches import JointBatch, JointBatches, grouped_batches
from phalanx.training.replica_model import ReplicaModel


def evaluate_on_replicas(
    replica_model: ReplicaModel,
    source: ShardedInput,
    callbacks: Any,
    *,
    has_batch_listeners: bool,
    on_change: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Evaluate on the whole source; return the logs, the same on every rank.

    Args:
        has_batch_listeners: Whether callbacks of any rank see single batches.
        on_change: See `ReplicaModel.run_over`.
    """
    progress.report("evaluate")
    replica_model.model.stop_evaluating = False
    set_mode(replica_model.model, training=False)
    callbacks.on_test_begin()
    stops = bool(replica_model.model.stop_evaluating)
    logs = replica_model.run_over(
        source, lambda: _pass(replica_model, source, callbacks, has_batch_listeners, stops), on_change
    )
    callbacks.on_test_end(logs)
    return logs


def _pass(
    replica_model: ReplicaModel, source: ShardedInput, callbacks: Any, has_batch_listeners: bool, stops: bool
) -> dict[str, Any]:
    """Evaluate on all batches, or one group if callbacks of any rank have already stopped the evaluation (`stops`)."""
    model, engine, replica = replica_model.model, replica_model.engine, replica_model.replica
    bar = progress_bar.progress_bar(callbacks, replica.world_size)
    model.stop_evaluating = stops = replica.any(stops)  # like Keras, which checks after each group
    before = engine.metric_rules.values()
    model.reset_metrics()
    own_samples = all_samples = 0
    logs: Mapping[str, Any] = {}
    source.position.reset()  # every evaluation begins with the first batch, also with `validation_steps`
    engine.begin()
    start = engine.metric_rules.values()
    every_batch = engine.metric_rules.merge_every_batch or replica_model.deterministic is not None
    try:
        for first, last, batches in grouped_batches(JointBatches(source, 0, replica), model.steps_per_execution):
            callbacks.on_test_batch_begin(first)
            for batch in batches:
                if not all_samples:
                    replica_model.probes.examine(engine, "test_step", batch.data, source.structure)
                timeline.current.enter("forward")
                engine.set_batch_structure(source.structure)
                logs = evaluate_batch(replica_model, batch, start, merges=every_batch)
                timeline.current.leave()
                own_samples += batch.size
                all_samples += batch.global_size
                start = engine.metric_rules.values() if every_batch else start
                if bar is not None:
                    bar.count(batch.global_size)
            if has_batch_listeners and not every_batch:
                logs = engine.merged_metrics(own_samples / max(all_samples, 1), start, final=False)
            callbacks.on_test_batch_end(last, logs)
            if stops or (has_batch_listeners and replica.any(model.stop_evaluating)):
                break
        # Without data there is no result: zero would be the best possible loss.
        if not all_samples:
            return {}
        if not every_batch:
            logs = engine.merged_metrics(own_samples / all_samples, start, final=True)
        return dict(pythonify_logs(logs))
    except MembershipChangedError:
        engine.metric_rules.set_values(before)  # a metric that is not reset must not count batches twice
        raise
    finally:
        engine.end()
        timeline.current.leave()


def evaluate_by_program(
    evaluate: Callable[..., Any], arguments: FitArguments, callbacks: Any, **options: Any
) -> dict[str, Any]:
    """Evaluate on the validation data of a `fit` with the model's `evaluate`, like Keras's `fit`; return the logs.

    Args:
        options: Passed on. Keras's own `fit` adds `_use_cached_eval_dataset`, with which its `evaluate` reads the data
            that `fit` has opened; a custom `evaluate` may read it.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(arguments.validation_data)
    logs: dict[str, Any] = evaluate(
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=arguments.validation_batch_size or arguments.batch_size,
        steps=arguments.validation_steps,
        callbacks=callbacks,
        return_dict=True,
        **options,
    )
    return logs


def evaluate_batch(
    replica_model: ReplicaModel, batch: JointBatch, start: Sequence[Array], *, merges: bool
) -> Mapping[str, Any]:
    """Add this rank's part of a batch to the metrics, which had the values `start`.

    Args:
        merges: Whether the ranks merge the metrics now; if not, there are no logs yet.
    """
    replica_model.merge.set_batch_size(batch.global_size, batch.fixed_size)
    if (deterministic := replica_model.deterministic) is not None:
        return deterministic.test(batch, start)
    engine = replica_model.engine
    engine.test(batch.data, batch.share)
    return engine.merged_metrics(batch.share, start, final=True) if merges else {}
