"""`fit`, `evaluate`, `predict` and the single-batch methods of a Keras model on one of several replicas.

The walk of one training step: this rank's part of the global batch -> the engine's gradients -> the merge over
all ranks -> the engine's update -> callbacks. Arguments and results are those of the Keras methods; `batch_size`
is that of the global batch. All ranks must call the same methods in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
from keras.src import backend as keras_backend
from keras.src import tree
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.utils import io_utils
from keras.src.utils.python_utils import pythonify_logs

from phalanx.checkpoint.fit_resumption import kept
from phalanx.checkpoint.result_encoding import decode_history, decode_outputs, encode_history, encode_outputs
from phalanx.data import ShardedInput, shard_input
from phalanx.data.shuffling import Shuffling
from phalanx.engines import make_engine
from phalanx.engines.engine import Engine
from phalanx.errors import UnsupportedError
from phalanx.monitoring import timeline
from phalanx.runtime import progress
from phalanx.training import callback_list as callback_lists
from phalanx.training import state_sync
from phalanx.training.fit_arguments import FitArguments, capped
from phalanx.training.fit_loop import FitLoop
from phalanx.training.joint_batches import (
    JointBatch,
    JointBatches,
    check_batch_size,
    check_normalization,
    compare_inputs,
    compare_samples,
)
from phalanx.training.replica import EntryOverError, Replica, own_seed
from phalanx.training.steps.gradient_merge import StepMerge
from phalanx.training.steps.local_sgd import LocalSGDStepper
from phalanx.training.steps.sharded_optimizer import ShardedOptimizerStepper, applies, make_sharded_stepper
from phalanx.training.steps.stepper import EveryStep, Stepper, inner_optimizer, steps_to_hold, unit_of_gradients
from phalanx.training.training_policy import EVERY_STEP, TrainingPolicy
from phalanx.transport.serialization import decode, encode

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReplicaTrainer:
    """Trains, evaluates and applies one compiled Keras model together with the other replicas."""

    def __init__(self, model: Any, replica: Replica, policy: TrainingPolicy = EVERY_STEP) -> None:
        self.model = model
        self.replica = replica
        self._policy = policy
        # Where the ranks exchange weights, these are what is compressed, and gradients are those of single batches.
        self.merge = StepMerge(replica, policy.compression if policy.period is None else None)
        # The same for all steps: functions are traced for it. Replicas with a rhythm hold nothing.
        self.merge.holds = policy.period is None and steps_to_hold(model) > 1
        self.merge.unit = unit_of_gradients(model)
        self._stepper: LocalSGDStepper | None = None
        self._shared_update: ShardedOptimizerStepper | None = None
        self._engine: Engine | None = None
        self._synchronised = False
        self._peeked = False
        self._announced: set[Any] = set()
        self._seeds_given = 0

    def resynchronise(self) -> None:
        """The model has been trained by others: `*_on_batch` must begin with the chief's state again."""
        self._synchronised = False

    # The public methods, as Keras has them.

    def fit(self, **arguments: Any) -> Any:
        """Takes `FitArguments`."""
        self.model._assert_compile_called("fit")
        with kept(arguments.get("callbacks"), self.model, self.replica) as resumption:
            try:
                with self.replica.entry(seed=None if resumption is None else resumption.seed) as entry:
                    if resumption is not None and self.replica.elastic is not None:
                        resumption.begin_with(entry.seed)
                    fitting = FitLoop(self, FitArguments(**arguments), resumption)
                    try:
                        history = fitting.run()
                    finally:
                        fitting.release_callbacks()
                    if self.replica.elastic is not None:
                        entry.result = encode_history(history)
            except EntryOverError as over:
                history = decode_history(over.result, self.model)
                logger.warning(
                    "This worker came when this fit() was over: its model has the weights of before, until it is let "
                    "in at another fit(), and it overwrites no file."
                )
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
    ) -> Any:
        self.model._assert_compile_called("evaluate")
        try:
            with self.replica.entry() as entry:
                source = self.shard(x, y, sample_weight, batch_size, steps)
                self._wait_for_the_result()
                self.prepare(source, "evaluate")
                self._synchronise_anew()
                # A rank may be told to show less than the chief.
                own = _shows_batches(verbose) or callback_lists.watches_batches(callbacks, "test")
                watched = self.replica.steadily(lambda: self.replica.any(own))
                callbacks = self.callbacks(callbacks, verbose, 1, source.num_batches)
                logs = self.evaluate_jointly(source, callbacks, watched=watched)
                if self.replica.elastic is not None:
                    entry.result = encode(logs)
        except EntryOverError as over:
            logs = decode(over.result)
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """The outputs for all samples, in their order, on every rank."""
        try:
            with self.replica.entry() as entry:
                source = self.shard(x, None, None, batch_size, steps, in_order=True)
                source.take_as_it_is()
                self._wait_for_the_result()
                self._prepare_to_predict(source, "predict")
                self._synchronise_anew()
                watches = callback_lists.watches_batches(callbacks, "predict")
                watched = self.replica.steadily(lambda: self.replica.any(watches))
                callbacks = self.callbacks(callbacks, verbose, 1, source.num_batches)
                callbacks.on_predict_begin()
                outputs = self._repeatedly(source, lambda: self._predict(source, callbacks, watched))
                callbacks.on_predict_end()
                if self.replica.elastic is not None:
                    entry.result = encode_outputs(outputs)
        except EntryOverError as over:
            outputs = decode_outputs(over.result, self.model)
        return outputs

    def _predict(self, source: ShardedInput, callbacks: Any, watched: bool) -> Any:
        model, engine = self.model, self._engine
        assert engine is not None
        listened = callback_lists.listens_to_batches(callbacks, "predict")
        progress.report("predict")
        model.stop_predicting = False
        outputs = _Outputs()  # not gathered yet
        whole: list[Any] = []  # gathered already, as callbacks see them
        engine.begin()
        try:
            for first, last, batches in self._executions(source):
                if listened:
                    callbacks.on_predict_batch_begin(first)
                for batch in batches:
                    timeline.current.enter("forward")
                    outputs.add(_rows(engine.predict(batch.data, source.form), batch.size), batch.sizes)
                    timeline.current.leave()
                    self.count(callbacks, batch)
                if watched:
                    whole.append(self._everyones(outputs))
                    outputs = _Outputs()
                if listened:
                    callbacks.on_predict_batch_end(last, {"outputs": whole[-1] if watched else outputs.parts[-1]})
                if watched and self.replica.any(model.stop_predicting):
                    break
        finally:
            engine.end()
        if outputs.parts:
            whole.append(self._everyones(outputs))
        if not whole:
            raise ValueError("predict() got no data: the input has no batches.")
        return whole[0] if len(whole) == 1 else tree.map_structure_up_to(whole[0], _concatenated, *whole)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        self.model._assert_compile_called("train_on_batch")
        if class_weight is not None:
            if sample_weight is not None:
                raise ValueError("Arguments `sample_weight` and `class_weight` cannot be specified at the same time.")
            sample_weight = data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
        batch, engine = self._single("train_on_batch", x, y, sample_weight)
        self._reset_for_a_single_batch()
        # Nothing is held back: the program may save the model after it.
        stepper = EveryStep(self.model, engine, self.merge, self.replica, holds=False)
        engine.begin()
        try:
            stepper.begin(watched=True)
            timeline.current.enter("forward/backward")
            stepper.train(batch, last=True)
        finally:
            engine.end()
            timeline.current.leave()
        return self._batch_result(engine.logs(), return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        self.model._assert_compile_called("test_on_batch")
        batch, engine = self._single("test_on_batch", x, y, sample_weight)
        self._reset_for_a_single_batch()
        engine.begin()
        try:
            timeline.current.enter("forward")
            engine.test(batch.data, batch.share)
            logs = engine.merged_metrics(batch.share, final=True)
        finally:
            engine.end()
            timeline.current.leave()
        return self._batch_result(logs, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        batch, engine = self._single("predict_on_batch", x)
        engine.begin()
        try:
            outputs = _Outputs()
            outputs.add(_rows(engine.predict(batch.data), batch.size), batch.sizes)
        finally:
            engine.end()
        return self._everyones(outputs)

    # Their parts.

    def _reset_for_a_single_batch(self) -> None:
        """Metrics of single batches are of the batch alone since Keras 3.15; before, of all since the last reset."""
        if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15):
            self.model.reset_metrics()

    def shard(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        steps: int | None,
        *,
        shuffle: Any = False,
        class_weight: Any = None,
        seed: int | None = None,
        in_order: bool = False,
    ) -> ShardedInput:
        """Args:
        in_order: see `shard_input`.
        seed: from which the orders of the samples follow; None: in fixed jobs the chief shuffles as Keras does.
        """
        steps = capped(steps, keras.config.max_steps_per_epoch(), "steps_per_epoch")
        return shard_input(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=shuffle,
            class_weight=class_weight,
            rank=self.replica.rank,
            # A candidate's input is cut anew when it is let in; until then it is one of several.
            world_size=self.replica.world_size if not self.replica.is_candidate else 2,
            shuffling=None if self.replica.elastic or seed is not None else self._shuffling(),
            seed=self._new_seed() if seed is None else seed,
            in_order=in_order,
        )

    def _new_seed(self) -> int:
        """A seed for one pass of `fit`, equal on all ranks."""
        if self.replica.elastic is not None:
            return self.replica.common_seed()
        self._seeds_given += 1
        seed: Any = self.replica.from_chief(own_seed() ^ self._seeds_given)
        return int(seed)

    def _shuffling(self) -> Shuffling:
        return Shuffling(
            is_chief=self.replica.is_chief,
            peeked=lambda: self._peeked,
            told=lambda own: self.replica.communicator.broadcast([own])[0],
        )

    def prepare(self, source: ShardedInput, method: str) -> Engine:
        """The engine, with all variables created for the batches of the source, which was passed to this method."""
        if self._engine is None:
            self._engine = make_engine(self.model, self.merge)
        self._compare(source, method)
        self._peeked = self._engine.builds_from_a_batch
        first = source.peek(restart=self._peeked)
        self._engine.expect(source.form)
        check_batch_size(self.model, first, self.replica.world_size)
        self._engine.build(first.data)
        if method in ("fit", "train_on_batch") and self._policy.period is not None:
            check_normalization(self.model)
        return self._engine

    def _prepare_to_predict(self, source: ShardedInput, method: str) -> Engine:
        """The engine, with the layers' variables created: a model need not be compiled to predict."""
        if self._engine is None:
            self._engine = make_engine(self.model, self.merge)
        self._compare(source, method)
        if not all(layer.built for layer in self.model._flatten_layers()):
            keras_backend.compute_output_spec(self.model, _keras_tensors(source.peek().data[0]), training=False)
        return self._engine

    def _compare(self, source: ShardedInput, method: str) -> None:
        """Raise on every rank if the ranks were given different data."""
        self.replica.steadily(lambda: compare_inputs(source, self.replica, method))
        if method != "fit":  # which does so itself, once it knows whether it goes on somewhere
            self.replica.steadily(lambda: compare_samples(source, self.replica))

    def announce(self, source: ShardedInput, verbose: Any) -> None:
        """The chief says how the training data of a model are divided, once for each way."""
        line = source.policy_line
        if not self.replica.is_chief:
            return
        for say, wanted in ((logger.info, True), (io_utils.print_msg, verbose != 0)):
            if wanted and (say, line) not in self._announced:
                self._announced.add((say, line))
                say(line)

    def has_synchronised(self) -> None:
        """All ranks have the same state now."""
        self._synchronised = True

    def make_stepper(self, engine: Engine, *, repeats: bool) -> Stepper:
        """What takes the steps of this model.

        Args:
            repeats: whether another process may have to go on from between any two steps.
        """
        period, compression = self._policy.period, self._policy.compression
        repeats = repeats or self.replica.elastic is not None
        if period is None:
            # What a rank holds of gradients is in no checkpoint, and would be lost with it.
            return EveryStep(self.model, engine, self.merge, self.replica, holds=not repeats)
        if self._stepper is None:
            self._stepper = LocalSGDStepper(self.model, engine, self.merge, self.replica, period, compression)
        # What is on its way between two exchanges is in no checkpoint, and would be lost with a replica.
        self._stepper.overlaps = period.overlap and not repeats
        return self._stepper

    def faster_stepper(self, engine: Engine, callbacks: Any) -> Stepper | None:
        """What takes the steps of this model between which nobody looks at it, where there is something faster.

        Args:
            callbacks: that this rank runs.
        """
        looks = callback_lists.looks_between_batches(callbacks)
        if self.replica.any(looks or not applies(self.model, engine, self.merge, self.replica)):
            return None
        if self._shared_update is None or not self._shared_update.serves(self.model, engine):
            self._shared_update = make_sharded_stepper(self.model, engine, self.merge, self.replica)
        if self._shared_update is not None:
            if self._shared_update.has_handed_over:
                return None
            self._shared_update.shows = self.replica.any(callback_lists.listens_to_batches(callbacks, "train"))
        return self._shared_update

    def _synchronise(self) -> None:
        if not self._synchronised:
            state_sync.synchronise(self.model, self.replica)
            self._synchronised = True

    def callbacks(self, callbacks: Any, verbose: Any, epochs: int, steps: int | None, *, history: bool = False) -> Any:
        return callback_lists.make_list(
            callbacks,
            model=self.model,
            chief=self.replica.is_chief,
            replicas=self.replica.world_size,
            verbose=verbose,
            epochs=epochs,
            steps=steps,
            history=history,
        )

    def _executions(self, source: ShardedInput) -> Iterator[tuple[int, int, list[JointBatch]]]:
        """Batches grouped as `steps_per_execution` says: callbacks see only the first and the last of a group."""
        group: list[JointBatch] = []
        size = self.model.steps_per_execution
        walk = JointBatches(source, 0, self.replica)
        try:
            while (batch := walk.next()) is not None:
                group.append(batch)
                walk.done += 1
                if len(group) == size:
                    yield walk.done - size, walk.done - 1, group
                    group = []
            if group:
                first = walk.done - len(group)
                yield first, first + size - 1, group  # Keras, too, names the last step of a whole group
        finally:
            walk.close()

    def evaluate_jointly(
        self, source: ShardedInput, callbacks: Any, *, watched: bool, adapt: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Evaluate on all of a source; the logs, the same on every rank.

        Args:
            watched: whether callbacks see single batches.
            adapt: see `Replica.steadily`.
        """
        progress.report("evaluate")
        callbacks.on_test_begin()
        logs = self._repeatedly(source, lambda: self._evaluate(source, callbacks, watched), adapt)
        callbacks.on_test_end(logs)
        return logs

    def _evaluate(self, source: ShardedInput, callbacks: Any, watched: bool) -> dict[str, Any]:
        model, engine, replica = self.model, self._engine, self.replica
        assert engine is not None
        model.stop_evaluating = False
        model.reset_metrics()
        own = everyone = 0
        logs: Mapping[str, Any] = {}
        source.reset()  # every evaluation begins with the first batch, also with `validation_steps`
        engine.begin()
        try:
            for first, last, batches in self._executions(source):
                callbacks.on_test_batch_begin(first)
                for batch in batches:
                    timeline.current.enter("forward")
                    engine.expect(source.form)
                    engine.test(batch.data, batch.share)
                    timeline.current.leave()
                    own += batch.size
                    everyone += batch.global_size
                    self.count(callbacks, batch)
                if watched:
                    logs = engine.merged_metrics(own / max(everyone, 1), final=False)
                callbacks.on_test_batch_end(last, logs)
                if watched and replica.any(model.stop_evaluating):
                    break
            # Of no data nothing is known: zeros would be the best losses of all.
            return pythonify_logs(engine.merged_metrics(own / everyone, final=True)) if everyone else {}
        finally:
            engine.end()
            timeline.current.leave()

    def _repeatedly(self, source: ShardedInput, action: Callable[[], T], adapt: Callable[[], None] | None = None) -> T:
        """Go through all of a source, and again from its beginning whenever the job has other members: what those who
        were lost had counted is lost with them."""

        def regroup() -> None:
            source.regroup(self.replica.rank, self.replica.world_size)

        if self.replica.elastic is None:
            return action()
        if adapt is None:
            regroup()  # the members may have changed since it was cut
        with source.remembering() as rewind:

            def begin_again() -> None:
                (adapt or regroup)()
                rewind()

            return self.replica.steadily(action, begin_again)

    def _wait_for_the_result(self) -> None:
        """Members are let in to a `fit` only: a candidate waits for what comes of all else."""
        if self.replica.is_candidate:
            self.replica.take_part()

    def _synchronise_anew(self) -> None:
        self.replica.steadily(lambda: state_sync.synchronise(self.model, self.replica))

    def _single(self, method: str, x: Any, y: Any = None, sample_weight: Any = None) -> tuple[JointBatch, Engine]:
        """This rank's part of the one batch that this method was given."""
        if self.replica.is_candidate:
            raise UnsupportedError(
                "This worker came to the job when it ran already, and single batches (`train_on_batch`) are not kept "
                "for those who come later. Use `fit`, or a loop under `phalanx.elastic.run`."
            )
        size = len(next(leaf for leaf in tree.flatten(x) if leaf is not None))
        source = self.shard(x, y, sample_weight, size, None, seed=0)
        predicts = method == "predict_on_batch"
        engine = self._prepare_to_predict(source, method) if predicts else self.prepare(source, method)
        self._synchronise()
        return self._first(source), engine

    def _first(self, source: ShardedInput) -> JointBatch:
        batch = JointBatches(source, 0, self.replica).next()
        assert batch is not None, "the one batch given"
        return batch

    def _batch_result(self, logs: Mapping[str, Any], return_dict: bool) -> Any:
        logs = pythonify_logs(logs)
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    def _everyones(self, outputs: _Outputs) -> Any:
        """The outputs for these batches of all ranks, in the order of the samples."""
        one = outputs.parts[0]
        return tree.map_structure_up_to(one, lambda *parts: self._in_order(parts, outputs.sizes), *outputs.parts)

    def _in_order(self, parts: Any, sizes: list[tuple[int, ...]]) -> np.ndarray[Any, Any]:
        """All ranks' rows, batch by batch and in each batch in rank order."""
        columns = self._all_gather(np.concatenate(parts))
        if len(columns) == 1:
            return columns[0]
        rows = self.replica.communicator.all_gather(np.array([len(part) for part in parts], np.int64))
        starts = np.zeros(len(columns), int)
        pieces = []
        for batch, samples in zip(np.stack(rows, axis=1).tolist(), sizes, strict=True):
            _check_rows(batch, samples)
            for rank, count in enumerate(batch):
                pieces.append(columns[rank][starts[rank] : starts[rank] + count])
                starts[rank] += count
        return np.concatenate(pieces)

    def _all_gather(self, rows: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Each rank's rows; also of strings, as the layers have them that look words up."""
        communicator = self.replica.communicator
        if rows.dtype.kind not in "OSU":
            return communicator.all_gather(rows)
        everyones = communicator.all_gather_bytes(encode(rows.astype(object)))
        return [decode(one).astype(rows.dtype) for one in everyones]

    def agree_on_learning_rate(self, adapt: Callable[[], None]) -> None:
        """The chief's learning rate on every rank, where callbacks may have set it."""
        optimizer = inner_optimizer(self.model.optimizer)
        rate = getattr(optimizer, "_learning_rate", None)
        if not isinstance(rate, keras.Variable):  # a schedule follows the step count, which is the same everywhere
            return
        own = float(keras.ops.convert_to_numpy(rate.value))
        chief = float(self.replica.steadily(lambda: self.replica.from_chief(own), adapt))  # type: ignore[arg-type]
        if chief != own:
            optimizer.learning_rate = chief

    def count(self, callbacks: Any, batch: JointBatch) -> None:
        if (bar := callback_lists.progress_bar(callbacks)) is not None:
            bar.count(batch.global_size, self.replica.world_size)


def _keras_tensors(arrays: Any) -> Any:
    """Symbolic tensors like these arrays."""

    def symbolic(array: Any) -> Any:
        kind = "string" if array.dtype.kind in "OSU" else keras_backend.standardize_dtype(array.dtype)
        return keras_backend.KerasTensor(array.shape, kind)

    return tree.map_structure(lambda array: None if array is None else symbolic(array), arrays)


class _Outputs:
    """What this rank predicted for its parts of batches.

    Attributes:
        parts: a structure of arrays for each batch.
        sizes: of each batch, the samples of each rank.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.sizes: list[tuple[int, ...]] = []

    def add(self, outputs: Any, sizes: tuple[int, ...]) -> None:
        self.parts.append(outputs)
        self.sizes.append(sizes)


def _concatenated(*parts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate(parts)


def _rows(outputs: Any, size: int) -> Any:
    """The outputs for so many samples: none, where the batch was a stand-in of one."""
    return outputs if size else tree.map_structure(lambda part: part[:0], outputs)


def _check_rows(rows: Sequence[int], samples: Sequence[int]) -> None:
    """Raise UnsupportedError unless each sample of a batch has as many rows of an output: one, or several where a model
    makes its first axis longer.

    Args:
        rows, samples: of each rank.
    """
    each, rest = divmod(sum(rows), sum(samples))
    if rest or not each or any(count != each * size for count, size in zip(rows, samples, strict=True)):
        raise UnsupportedError(
            f"An output of the model has {list(rows)} rows for {list(samples)} samples on the replicas, each of which "
            f"predicts its part of a batch: which rows belong to which sample cannot be told. Let each sample have its "
            f"row, or as many as the others; or predict on one process (a model outside of the strategy's scope)."
        )


def _shows_batches(verbose: Any) -> bool:
    return verbose in ("auto", 1, True)
