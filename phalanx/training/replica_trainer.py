"""`fit`, `evaluate`, `predict` and the single-batch methods of a Keras model on one of several replicas.

Arguments and results are those of the Keras methods; `batch_size` is the global batch size. All ranks must call the
same methods in the same order. In elastic jobs each call is an *entry* (`Replica.entry`): a process that joins later
receives the results of finished entries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import keras

from phalanx.checkpoint.result_encoding import decode_history, decode_outputs, encode_history, encode_outputs
from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines.engine import Engine
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.keras_internals import class_weight_to_sample_weights, pythonify_logs
from phalanx.monitoring import timeline
from phalanx.training import callback_hooks
from phalanx.training.checks.model_checks import annotate_size_errors
from phalanx.training.evaluation import evaluate_batch, evaluate_on_replicas
from phalanx.training.finished_fit import adopt_finished_fit, encode_finished_fit
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.fit_loop import FitLoop
from phalanx.training.fit_resumption import FitResumption, resumable
from phalanx.training.fit_setup import prepare_fit
from phalanx.training.joint_batches import JointBatch, JointBatches
from phalanx.training.prediction import LayerCounts, LocalOutputs, local_outputs, predict_on_replicas
from phalanx.training.replica import EntryFinishedError, Replica
from phalanx.training.replica_coordination import ReplicaCoordination
from phalanx.training.replica_model import ReplicaModel
from phalanx.training.step_examination import examine_fit
from phalanx.training.training_policy import EVERY_STEP, TrainingPolicy
from phalanx.transport.serialization import decode, encode

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReplicaTrainer:
    """Trainer that fits, evaluates and applies one compiled Keras model together with the other replicas."""

    def __init__(self, model: Any, replica: Replica, policy: TrainingPolicy = EVERY_STEP) -> None:
        self._model = model
        self._replica = replica
        self._replica_model = ReplicaModel(model, replica, policy)

    def fit(self, **arguments: Any) -> Any:
        """Train the model with these `FitArguments`."""
        self._model._assert_compile_called("fit")
        with resumable(arguments.get("callbacks"), self._model, self._replica) as resumption:
            try:
                # Inside `resumable`: the seed of a new entry may come from a checkpoint.
                with self._replica.entry(seed=None if resumption is None else resumption.seed) as entry:
                    # A process that joins gets the seed with the entry, and must not look for checkpoints.
                    if resumption is not None and self._replica.elastic is not None:
                        resumption.set_seed(entry.seed)
                    history = self._fit(FitArguments(**arguments), resumption)
                    if self._replica.elastic is not None:
                        entry.result = encode_history(history)
            except EntryFinishedError as over:
                history = decode_history(over.result, self._model)
                has_weights = adopt_finished_fit(over.state, self._model, arguments.get("callbacks"))
                logger.warning(
                    "This worker joined after this fit() had ended. %s, and it overwrites no file.",
                    "It has its history and weights"
                    if has_weights
                    else "It has its history, but its model keeps its previous weights until another fit() begins",
                )
        return history

    def examine_fit(self, **arguments: Any) -> NoReturn:
        """See `step_examination.examine_fit`."""
        self._model._assert_compile_called("fit")
        examine_fit(self._replica_model, FitArguments(**arguments))

    def _fit(self, arguments: FitArguments, resumption: FitResumption | None) -> Any:
        fit = prepare_fit(self._replica_model, arguments, resumption)
        try:
            history = FitLoop(self._model, fit.state, ReplicaCoordination(fit)).run()
        finally:
            fit.state.exit_stack.close()
        if self._replica.elastic is not None and self._replica.is_chief:
            self._replica.present_entry.state = encode_finished_fit(self._model, fit.recorder.callback_states())
        return history

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **unknown: Any,
    ) -> Any:
        """Return the metrics over all samples, the same on every rank."""
        self._model._assert_compile_called("evaluate")
        # Only a custom `evaluate` that `fit` has called passes this on.
        uses_data_of_fit = unknown.pop("_use_cached_eval_dataset", False)
        if unknown:
            raise ValueError(f"Arguments not recognized: {unknown}")
        replica, replica_model = self._replica, self._replica_model

        def run() -> dict[str, Any]:
            source = replica_model.shard(x, y, sample_weight, batch_size=batch_size, steps=steps)
            self._wait_for_result()
            replica_model.prepare(source, "evaluate")
            replica_model.synchronize()
            # `verbose` may differ between the ranks.
            shows = verbose in ("auto", 1, True) or callback_hooks.has_batch_hooks(callbacks, "test")
            has_batch_listeners = replica.retry(lambda: replica.any(shows))
            built = replica_model.build_callbacks(callbacks, verbose, epochs=1, steps=source.num_batches)
            return evaluate_on_replicas(replica_model, source, built, has_batch_listeners=has_batch_listeners)

        if uses_data_of_fit and replica_model.validation is not None:
            logs = replica_model.validation(replica_model.build_callbacks(callbacks, verbose, epochs=1))
        else:
            logs = self._as_entry(run, encode, decode)
        return logs if return_dict else self._model._flatten_metrics_in_order(logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Return the outputs for all samples, in their order, on every rank."""
        replica, replica_model = self._replica, self._replica_model

        def run() -> Any:
            source = replica_model.shard(x, None, None, batch_size=batch_size, steps=steps)
            source.position.skips_reset = True
            self._wait_for_result()
            replica_model.prepare_to_predict(source, "predict")
            replica_model.synchronize()
            has_hooks = callback_hooks.has_batch_hooks(callbacks, "predict")
            has_batch_listeners = replica.retry(lambda: replica.any(has_hooks))
            built = replica_model.build_callbacks(callbacks, verbose, epochs=1, steps=source.num_batches)
            return predict_on_replicas(replica_model, source, built, has_batch_listeners=has_batch_listeners)

        return self._as_entry(run, encode_outputs, lambda content: decode_outputs(content, self._model))

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Take one training step on this global batch; return its logs, the same on every rank."""
        self._model._assert_compile_called("train_on_batch")
        if class_weight is not None:
            if sample_weight is not None:
                raise ValueError("Arguments `sample_weight` and `class_weight` cannot be specified at the same time.")
            sample_weight = class_weight_to_sample_weights(y, class_weight)
        batch = _only(self._batches_of_one("train_on_batch", x, y, sample_weight))
        self._reset_metrics_of_a_single_batch()
        with self._running_engine(batch) as engine:
            stepper = self._replica_model.stepper(is_single=True)
            stepper.begin(has_batch_listeners=True)
            timeline.current.enter("forward/backward")
            stepper.train(batch, last=True)
        return self._single_batch_result(engine.logs(), return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Return the metrics of this global batch, the same on every rank."""
        self._model._assert_compile_called("test_on_batch")
        batch = _only(self._batches_of_one("test_on_batch", x, y, sample_weight))
        self._reset_metrics_of_a_single_batch()
        with self._running_engine(batch) as engine:
            timeline.current.enter("forward")
            start = engine.metric_rules.values()
            logs = evaluate_batch(self._replica_model, batch, start, merges=True)
        return self._single_batch_result(logs, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Return the outputs for this global batch, on every rank."""
        batches = self._batches_of_one("predict_on_batch", x)
        outputs = LocalOutputs.create(batches, self._replica_model)
        batch = _only(batches)
        with self._running_engine(batch):
            counts = LayerCounts(self._replica_model, outputs)
            with counts.counting(batch):
                outputs.add(local_outputs(self._replica_model, batch, ElementStructure.ALONE), batch)
            counts.merge()
        return outputs.gather()

    # Internals.

    def _as_entry(self, run: Callable[[], T], encode: Callable[[T], bytes], decode: Callable[[bytes], T]) -> T:
        """Return the result of `run`, as an entry: a process that joins later receives the members' result."""
        try:
            with self._replica.entry() as entry:
                result = run()
                if self._replica.elastic is not None:
                    entry.result = encode(result)
                return result
        except EntryFinishedError as over:
            return decode(over.result)

    def _wait_for_result(self) -> None:
        """As a candidate, wait for the result: members are admitted only to `fit`."""
        if self._replica.is_candidate:
            self._replica.join_entry()

    def _batches_of_one(self, method: str, x: Any, y: Any = None, sample_weight: Any = None) -> JointBatches:
        if self._replica.is_candidate:
            raise UnsupportedError(
                "This worker joined a running job, and single batches (`train_on_batch`) are not kept for workers "
                "that join later. Use `fit`, or a loop under `phalanx.elastic.run`."
            )
        return self._replica_model.single_batch(method, x, y, sample_weight)

    @contextmanager
    def _running_engine(self, batch: JointBatch) -> Iterator[Engine]:
        engine = self._replica_model.engine
        engine.begin()
        try:
            with annotate_size_errors(batch.data, self._replica.world_size):
                yield engine
        finally:
            engine.end()
            timeline.current.leave()

    def _reset_metrics_of_a_single_batch(self) -> None:
        """Reset the metrics: since Keras 3.15 they cover a single batch; before, all batches since the last reset."""
        if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15):
            self._model.reset_metrics()

    def _single_batch_result(self, logs: Mapping[str, Any], return_dict: bool) -> Any:
        logs = pythonify_logs(logs)
        return logs if return_dict else self._model._flatten_metrics_in_order(logs)


def _only(batches: JointBatches) -> JointBatch:
    batch = batches.next()
    assert batch is not None, "the one batch given"
    return batch
