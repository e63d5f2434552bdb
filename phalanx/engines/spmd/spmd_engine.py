"""Keras models on all devices of a mesh: each step is one compiled program over global arrays, with nothing to merge.

XLA divides the program and inserts the collectives, so everything in a step is computed over the global batch: batch
normalization, losses between samples, norms of gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from phalanx.arrays.tree import map_leaves
from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines.engine import Batch, Engine
from phalanx.engines.metric_rules import COUNTER
from phalanx.engines.replica.jax.model_arguments import ModelArguments
from phalanx.engines.spmd.global_arrays import fetch, put_like, put_part
from phalanx.engines.spmd.placed_model import PlacedModel, placement_scope
from phalanx.engines.spmd.placement import Placement
from phalanx.engines.spmd.step_programs import StepPrograms
from phalanx.keras_compat import model_state

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


class SpmdEngine(Engine):
    """Steps of one Keras model on a mesh; see `phalanx.engines.engine.Engine`."""

    merges = False

    def __init__(self, model: Any, placement: Placement) -> None:
        self._arguments = ModelArguments(model, fetch, put_like)
        super().__init__(model, self._arguments)
        self._placement = placement
        self._placed = PlacedModel(model, placement)
        programs = StepPrograms(model, self._placed, placement, self._batches)
        self._compilers = {
            "train": programs.compile_train,
            "test": programs.compile_test,
            "predict": programs.compile_predict,
        }
        # Whether the warning about indivisible batches was considered. It is only about the first batch.
        self._has_trained = False
        # Compiled with the shardings of the placed variables. Cleared when these or the variables change.
        self._functions: dict[tuple[str, ElementStructure], Callable[..., Any]] = {}
        self._logs: dict[str, Any] = {}  # of the newest training step
        self._test_logs: dict[str, Any] = {}

    def retrace(self) -> None:
        self._functions.clear()

    def build(self, data: Batch) -> None:
        with placement_scope(self._placement):
            self._model._symbolic_build(data_batch=self._batches.for_keras(data))
        if self._placed.place():
            self.retrace()
        self.metric_rules.set_variables(self._model.metrics_variables)
        self.metric_rules.decide([COUNTER] * len(self._model.metrics_variables))  # there is nothing to merge

    def train(self, data: Batch, share: float) -> None:
        if not self._has_trained:
            self._has_trained = True
            self._warn_of_replicated_batches(data, share)
        state = self._arguments.get(with_optimizer=True)
        self._logs, state = self._function("train")(state, self._put(data, share))
        self._arguments.keep(*state)

    def test(self, data: Batch, share: float) -> None:
        trainable, non_trainable, _, metrics = self._arguments.get(with_optimizer=False)
        state = (trainable, non_trainable, metrics)
        self._test_logs, state = self._function("test")(state, self._put(data, share))
        trainable, non_trainable, metrics = state
        self._arguments.keep(trainable, non_trainable, None, metrics)

    def predict(self, data: Batch, structure: ElementStructure = ElementStructure.PARTS, share: float = 1.0) -> Any:
        trainable, non_trainable, _, metrics = self._arguments.get(with_optimizer=False)
        state = (trainable, non_trainable)
        outputs, non_trainable = self._function("predict")(state, self._put(data, share), structure)
        self._arguments.keep(trainable, non_trainable, None, metrics)
        return tree.map_structure(fetch, outputs)

    def logs(self) -> Mapping[str, Any]:
        return self._logs

    def merged_metrics(
        self, share: float, start: Sequence[Array], *, final: bool, training: bool = False
    ) -> Mapping[str, Any]:
        """See `Engine.merged_metrics`. One program has already counted all samples."""
        logs = self._logs if training else self._test_logs
        if not final:
            return logs
        *_, metrics = self._arguments.get(with_optimizer=False)
        with keras.StatelessScope(list(zip(self._model.metrics_variables, metrics, strict=True))):
            chosen: Mapping[str, Any] = self._model._get_metrics_result_or_logs(logs)
        return chosen

    def merge_metrics(self, share: float, start: Sequence[Array]) -> None:
        """Do nothing. See `merged_metrics`."""

    def _warn_of_replicated_batches(self, data: Batch, share: float) -> None:
        """Warn if every device computes the whole of a batch of this size, the first one."""
        rows, parts = round(model_state.samples(data) / share), self._placement.data_shards
        if rows % parts:
            logger.warning(
                "A batch of %d samples cannot be divided into %d equal parts, so every device computes all of it. The "
                "numbers are right, but more devices save no time. Choose a batch size that is a multiple of %d.",
                *(rows, parts, parts),
            )

    def _function(self, kind: str) -> Callable[..., Any]:
        key = kind, self._batches.structure
        if key not in self._functions:
            self._functions[key] = self._compilers[kind]()
        return self._functions[key]

    def _put(self, data: Batch, share: float) -> Batch:
        """Create the global batch, of which `data` is this process's part."""

        def put(part: Array) -> Any:
            rows = round(len(part) / share) if part.ndim else 1
            shape = (rows, *part.shape[1:]) if part.ndim else ()
            return put_part(part, rows, self._placed.batch_sharding(shape))

        placed: Batch = map_leaves(put, data)
        return placed
