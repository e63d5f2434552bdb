"""`fit`, `evaluate`, `predict` and the single-batch methods of a Keras model on one of several replicas.

The walk of one training step: this rank's part of the global batch -> the engine's gradients -> the merge over
all ranks -> the engine's update -> callbacks. Arguments and results are those of the Keras methods; `batch_size`
is that of the global batch. All ranks must call the same methods in the same order.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras.src import backend as keras_backend
from keras.src import tree
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.utils import io_utils
from keras.src.utils.python_utils import pythonify_logs

from phalanx.backends import make_engine
from phalanx.backends.engine import Engine
from phalanx.inputs import ShardedInput, accepts_batch_size, shard_input
from phalanx.inputs.keras_adapters import shuffled_orders
from phalanx.launcher import progress
from phalanx.training import callbacks as callback_lists
from phalanx.training import state
from phalanx.training.agreement import JointBatch, compare_inputs, compare_samples, joint_batches
from phalanx.training.fit_arguments import FitArguments, capped
from phalanx.training.merge import StepMerge
from phalanx.training.replica import Replica

logger = logging.getLogger(__name__)


class ReplicaTrainer:
    """Trains, evaluates and applies one compiled Keras model together with the other replicas."""

    def __init__(self, model: Any, replica: Replica) -> None:
        self._model = model
        self._replica = replica
        self._engine: Engine | None = None
        self._synchronised = False
        self._peeked = False
        self._announced = False
        self._seeds_given = 0

    def resynchronise(self) -> None:
        """The model has been trained by others: `*_on_batch` must begin with the chief's state again."""
        self._synchronised = False

    # The public methods, as Keras has them.

    def fit(self, **arguments: Any) -> Any:
        """Takes `FitArguments`."""
        model, replica = self._model, self._replica
        model._assert_compile_called("fit")
        call = FitArguments(**arguments)
        source = self._shard(
            call.x,
            call.y,
            call.sample_weight,
            call.batch_size,
            call.steps_per_epoch,
            shuffle=call.shuffle,
            class_weight=call.class_weight,
        )
        validation = None
        if call.validation_data is not None:
            val_x, val_y, val_weight = data_adapter_utils.unpack_x_y_sample_weight(call.validation_data)
            val_batch_size = call.validation_batch_size
            if val_batch_size is None and accepts_batch_size(val_x):
                val_batch_size = call.batch_size
            validation = self._shard(val_x, val_y, val_weight, val_batch_size, call.validation_steps)
            compare_inputs(validation, replica)
            compare_samples(validation, replica)
        engine = self._prepare(source)
        compare_samples(source, replica)
        self._announce(source, call.verbose)
        watched, watched_test = (
            replica.any(callback_lists.watches_batches(call.callbacks, p)) for p in ("train", "test")
        )
        callbacks = self._callbacks(call.callbacks, call.verbose, call.epochs, source.num_batches, history=True)
        listened = callback_lists.listens_to_batches(callbacks, "train")
        model.stop_training = False
        callbacks.on_train_begin()
        # A callback of the chief may just have restored a backup.
        initial_epoch = int(replica.from_chief(model._initial_epoch or call.initial_epoch))  # type: ignore[call-overload]
        progress.report("initial values")
        state.synchronise(model, replica)
        self._synchronised = True
        epoch_logs: dict[str, Any] = {}
        for epoch in range(initial_epoch, call.epochs):
            trained = False
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            self._agree_on_learning_rate()
            engine.begin()
            try:
                for first, last, batches in self._executions(source, epoch):
                    if listened:
                        callbacks.on_train_batch_begin(first)
                    if watched and replica.any(engine.in_variables):
                        engine.end()
                        self._agree_on_learning_rate()
                        engine.begin()
                    for step, batch in enumerate(batches, first):
                        progress.report("gradients", epoch=epoch, step=step)
                        engine.train(batch.data, batch.share)
                        trained = True
                        self._count(callbacks, batch)
                    if listened:
                        callbacks.on_train_batch_end(last, engine.logs())
                    if watched and replica.any(model.stop_training):
                        model.stop_training = True
                        break
            finally:
                engine.end()
            epoch_logs = pythonify_logs(engine.logs()) if trained else {}
            if validation is not None and model._should_eval(epoch, call.validation_freq):
                val_logs = self._evaluate(validation, callbacks, watched=watched_test)
                epoch_logs |= {f"val_{name}": value for name, value in val_logs.items()}
            callbacks.on_epoch_end(epoch, epoch_logs)
            if replica.any(model.stop_training):
                model.stop_training = True
                break
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and call.epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs=epoch_logs)
        return model.history

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
        self._model._assert_compile_called("evaluate")
        source = self._shard(x, y, sample_weight, batch_size, steps)
        self._prepare(source)
        state.synchronise(self._model, self._replica)
        # A rank may be told to show less than the chief.
        watched = self._replica.any(_shows_batches(verbose) or callback_lists.watches_batches(callbacks, "test"))
        callbacks = self._callbacks(callbacks, verbose, 1, source.num_batches)
        logs = self._evaluate(source, callbacks, watched=watched)
        return logs if return_dict else self._model._flatten_metrics_in_order(logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """The outputs for all samples, in their order, on every rank."""
        source = self._shard(x, None, None, batch_size, steps)
        engine = self._prepare_to_predict(source)
        state.synchronise(self._model, self._replica)
        model = self._model
        watched = self._replica.any(callback_lists.watches_batches(callbacks, "predict"))
        callbacks = self._callbacks(callbacks, verbose, 1, source.num_batches)
        listened = callback_lists.listens_to_batches(callbacks, "predict")
        progress.report("predict")
        model.stop_predicting = False
        callbacks.on_predict_begin()
        own: list[Any] = []
        sizes: list[tuple[int, ...]] = []
        engine.begin()
        try:
            for first, last, batches in self._executions(source, 0):
                if listened:
                    callbacks.on_predict_batch_begin(first)
                for batch in batches:
                    own.append(_rows(engine.predict(batch.data), batch.size))
                    sizes.append(batch.sizes)
                    self._count(callbacks, batch)
                if listened:
                    callbacks.on_predict_batch_end(last, {"outputs": own[-1]})
                if watched and self._replica.any(model.stop_predicting):
                    break
        finally:
            engine.end()
        callbacks.on_predict_end()
        if not own:
            raise ValueError("predict() got no data: the input has no batches.")
        return tree.map_structure_up_to(own[0], lambda *parts: self._in_order(parts, sizes), *own)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        self._model._assert_compile_called("train_on_batch")
        if class_weight is not None:
            if sample_weight is not None:
                raise ValueError("Arguments `sample_weight` and `class_weight` cannot be specified at the same time.")
            sample_weight = data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
        batch, engine = self._single(x, y, sample_weight)
        self._model.reset_metrics()
        engine.begin()
        try:
            engine.train(batch.data, batch.share)
        finally:
            engine.end()
        return self._batch_result(engine.logs(), return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        self._model._assert_compile_called("test_on_batch")
        batch, engine = self._single(x, y, sample_weight)
        self._model.reset_metrics()
        engine.begin()
        try:
            engine.test(batch.data, batch.share)
            logs = engine.merged_metrics(batch.share, final=True)
        finally:
            engine.end()
        return self._batch_result(logs, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        batch, engine = self._single(x, None, None, predicts=True)
        engine.begin()
        try:
            outputs = _rows(engine.predict(batch.data), batch.size)
        finally:
            engine.end()
        return tree.map_structure(lambda part: self._in_order([part], [batch.sizes]), outputs)

    # Their parts.

    def _shard(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        steps: int | None,
        *,
        shuffle: Any = False,
        class_weight: Any = None,
    ) -> ShardedInput:
        steps = capped(steps, keras.config.max_steps_per_epoch(), "steps_per_epoch")
        return shard_input(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=shuffle,
            class_weight=class_weight,
            rank=self._replica.rank,
            world_size=self._replica.world_size,
            orders=self._orders,
            seed=self._new_seed(),
        )

    def _new_seed(self) -> int:
        """A seed for one pass of `fit`, equal on all ranks. It follows from the state of Python's `random` (so
        `keras.utils.set_random_seed` makes it reproducible), but takes no number from it: Keras's own draws
        stay what they are without Phalanx."""
        copy = random.Random()
        copy.setstate(random.getstate())
        self._seeds_given += 1
        seed: Any = self._replica.from_chief(copy.getrandbits(31) ^ self._seeds_given)
        return int(seed)

    def _orders(self, samples: int, batch_size: int, shuffle: bool | str) -> Iterator[np.ndarray[Any, Any]]:
        """The orders of the samples, pass after pass: the chief shuffles, as Keras does it, and tells the others."""
        own = None
        if self._replica.is_chief:
            own = shuffled_orders(samples, batch_size, shuffle, peeked=self._peeked)
        while True:
            order = np.empty(samples, np.int64) if own is None else next(own).astype(np.int64)
            yield self._replica.communicator.broadcast([order])[0]

    def _prepare(self, source: ShardedInput) -> Engine:
        """The engine, with all variables created for the source's batches."""
        if self._engine is None:
            self._engine = make_engine(self._model, StepMerge(self._replica))
        compare_inputs(source, self._replica)
        self._peeked = self._engine.builds_from_a_batch
        self._engine.build(source.peek(restart=self._peeked).data)
        return self._engine

    def _prepare_to_predict(self, source: ShardedInput) -> Engine:
        """The engine, with the layers' variables created: a model need not be compiled to predict."""
        if self._engine is None:
            self._engine = make_engine(self._model, StepMerge(self._replica))
        compare_inputs(source, self._replica)
        if not all(layer.built for layer in self._model._flatten_layers()):
            keras_backend.compute_output_spec(self._model, _keras_tensors(source.peek().data[0]), training=False)
        return self._engine

    def _announce(self, source: ShardedInput, verbose: Any) -> None:
        """The chief says once for each model how its training data are divided."""
        if self._replica.is_chief and not self._announced:
            self._announced = True
            logger.info("%s", source.policy_line)
            if verbose != 0:
                io_utils.print_msg(source.policy_line)

    def _synchronise(self) -> None:
        if not self._synchronised:
            state.synchronise(self._model, self._replica)
            self._synchronised = True

    def _callbacks(self, callbacks: Any, verbose: Any, epochs: int, steps: int | None, *, history: bool = False) -> Any:
        return callback_lists.make_list(
            callbacks,
            model=self._model,
            chief=self._replica.is_chief,
            replicas=self._replica.world_size,
            verbose=verbose,
            epochs=epochs,
            steps=steps,
            history=history,
        )

    def _executions(self, source: ShardedInput, epoch: int) -> Iterator[tuple[int, int, list[JointBatch]]]:
        """Batches grouped as `steps_per_execution` says: callbacks see only the first and the last of a group."""
        group: list[JointBatch] = []
        size = self._model.steps_per_execution
        first = 0
        for step, batch in enumerate(joint_batches(source, epoch, self._replica)):
            group.append(batch)
            if len(group) == size:
                yield first, step, group
                group, first = [], step + 1
        if group:
            yield first, first + size - 1, group  # Keras, too, names the last step of a whole group

    def _evaluate(self, source: ShardedInput, callbacks: Any, *, watched: bool) -> dict[str, Any]:
        model, engine, replica = self._model, self._engine, self._replica
        assert engine is not None
        progress.report("evaluate")
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        own = everyone = 0
        logs: Mapping[str, Any] = {}
        source.reset()  # every evaluation begins with the first batch, also with `validation_steps`
        engine.begin()
        try:
            for first, last, batches in self._executions(source, 0):
                callbacks.on_test_batch_begin(first)
                for batch in batches:
                    engine.test(batch.data, batch.share)
                    own += batch.size
                    everyone += batch.global_size
                    self._count(callbacks, batch)
                if watched:
                    logs = engine.merged_metrics(own / max(everyone, 1), final=False)
                callbacks.on_test_batch_end(last, logs)
                if watched and replica.any(model.stop_evaluating):
                    break
            # Of no data nothing is known: zeros would be the best losses of all.
            logs = pythonify_logs(engine.merged_metrics(own / everyone, final=True)) if everyone else {}
        finally:
            engine.end()
        callbacks.on_test_end(logs)
        return dict(logs)

    def _single(self, x: Any, y: Any, sample_weight: Any, *, predicts: bool = False) -> tuple[JointBatch, Engine]:
        """This rank's part of the one batch given."""
        size = len(next(leaf for leaf in tree.flatten(x) if leaf is not None))
        source = self._shard(x, y, sample_weight, size, None)
        engine = self._prepare_to_predict(source) if predicts else self._prepare(source)
        self._synchronise()
        return next(joint_batches(source, 0, self._replica)), engine

    def _batch_result(self, logs: Mapping[str, Any], return_dict: bool) -> Any:
        logs = pythonify_logs(logs)
        return logs if return_dict else self._model._flatten_metrics_in_order(logs)

    def _in_order(self, parts: Any, sizes: list[tuple[int, ...]]) -> np.ndarray[Any, Any]:
        """All ranks' rows, batch by batch and in each batch in rank order."""
        columns = self._replica.communicator.all_gather(np.concatenate(parts))
        starts = np.zeros(len(columns), int)
        pieces = []
        for batch in sizes:
            for rank, size in enumerate(batch):
                pieces.append(columns[rank][starts[rank] : starts[rank] + size])
                starts[rank] += size
        return np.concatenate(pieces)

    def _agree_on_learning_rate(self) -> None:
        """The chief's learning rate on every rank, where callbacks may have set it."""
        optimizer = self._model.optimizer
        while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer = optimizer.inner_optimizer
        rate = getattr(optimizer, "_learning_rate", None)
        if not isinstance(rate, keras.Variable):  # a schedule follows the step count, which is the same everywhere
            return
        own = float(keras.ops.convert_to_numpy(rate.value))
        chief = float(self._replica.from_chief(own))  # type: ignore[arg-type]
        if chief != own:
            optimizer.learning_rate = chief

    def _count(self, callbacks: Any, batch: JointBatch) -> None:
        if (bar := callback_lists.progress_bar(callbacks)) is not None:
            bar.count(batch.global_size)


def _keras_tensors(arrays: Any) -> Any:
    """Symbolic tensors like these arrays."""
    return tree.map_structure(
        lambda a: None if a is None else keras_backend.KerasTensor(a.shape, keras_backend.standardize_dtype(a.dtype)),
        arrays,
    )


def _rows(outputs: Any, size: int) -> Any:
    return tree.map_structure(lambda part: part[:size], outputs)


def _shows_batches(verbose: Any) -> bool:
    return verbose in ("auto", 1, True)
