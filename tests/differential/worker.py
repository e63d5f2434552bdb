"""Runs programs in a long-lived process: on plain Keras, or as one replica of a job."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import keras
import numpy as np

from phalanx.keras_compat.global_batch.loss_id_reset import clearing_loss_ids
from tests.differential.comparison import flatten
from tests.support.commands import die_with_parent

REFUSALS = ("UnsupportedError", "ConfigurationError")
STACKS_AFTER_S = 440.0
"""The stacks of a program that takes longer are written to the log."""
MODULE = "differential_program"
ROUNDING = {"float64": 2.0**-52, "bfloat16": 2.0**-8, "float16": 2.0**-10}


@dataclass
class Outcome:
    """What became of a program in one process.

    Attributes:
        values: flattened, of each label that the program has yielded.
        error: type, message and traceback of what ended it.
        steps: which optimizer steps were taken after the last label.
    """

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: tuple[str, str, str] | None = None
    steps: int = 0

    @property
    def is_refused(self) -> bool:
        return self.error is not None and self.error[0] in REFUSALS and not self.steps


def serve(pipe: Connection, log: Path, cores: set[int], variables: dict[str, str]) -> None:
    """Run the programs that arrive, until the pipe closes."""
    die_with_parent()
    os.environ.update(variables)
    os.sched_setaffinity(0, cores)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _use_one_thread()
    scope: Callable[[], Any] = contextlib.nullcontext
    while True:
        try:
            path, folder, noise = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(STACKS_AFTER_S)
        if variables:
            import phalanx

            scope = phalanx.MultiWorkerMirroredStrategy().scope
        outcome = run(path, folder, scope, noise)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(outcome)


def run(path: Path, folder: Path, scope: Callable[[], Any], noise: int | None) -> Outcome:
    """Run a program once.

    Args:
        folder: for the files that the program writes.
        noise: seed of changes to weights and gradients as large as their rounding, which show how far it drives the
            results.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome()
    module = ModuleType(MODULE)
    module.__file__ = str(path)
    sys.modules[MODULE] = module
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        if scope is contextlib.nullcontext:
            _keep_added_losses(stack)
        if noise is not None:
            random = np.random.default_rng(noise)
            _disturb_gradients(stack, random)
            if noise % 2:  # not always: some optimizers treat weights apart that are zero
                _disturb_weights(stack, random)
        taken: dict[int, int] = {}
        try:
            exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
            if "tensorflow" not in sys.modules:  # Keras would import it for the seed alone
                stack.enter_context(mock.patch("keras.src.utils.rng_utils.tf", SimpleNamespace(available=False)))
            running = module.program(scope, folder)
            for label, value in running:
                outcome.values[f"{len(outcome.values)}. {label}"] = flatten(value)
                taken = _optimizer_steps(running.gi_frame)
        except BaseException as error:
            kind = type(error).__name__
            outcome.error = (kind, str(error), traceback.format_exc())
            outcome.steps = _steps_since(taken, error)
    return outcome


def _optimizer_steps(frame: FrameType) -> dict[int, int]:
    """The steps of the optimizers of all models that a program has at hand, by the optimizer's id."""
    models = [value for value in frame.f_locals.values() if isinstance(value, keras.Model)]
    optimizers = [optimizer for model in models if (optimizer := getattr(model, "optimizer", None)) is not None]
    optimizers = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
    # On JAX a `fit` of plain Keras that fails leaves variables without a value.
    counts = {id(optimizer): optimizer.iterations for optimizer in optimizers}
    return {number: int(count) for number, count in counts.items() if getattr(count, "_value", count) is not None}


def _steps_since(taken: dict[int, int], error: BaseException) -> int:
    """The optimizer steps since the last label."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_name != "program":
        trace = trace.tb_next
    if trace is None:
        return 0
    # An optimizer that was compiled since begins at 0.
    return sum(steps - taken.get(number, 0) for number, steps in _optimizer_steps(trace.tb_frame).items())


def _keep_added_losses(stack: contextlib.ExitStack) -> None:
    """Keras on JAX drops a loss whose `id` another layer's loss had before, at random."""
    replacement = clearing_loss_ids(keras.Layer.stateless_call)
    stack.enter_context(mock.patch.object(keras.Layer, "stateless_call", replacement))


def _disturb_weights(stack: contextlib.ExitStack, random: np.random.Generator) -> None:
    """Change a model's weights by about their rounding before it trains, evaluates or predicts."""
    trainer = keras.Model

    def disturbed(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(model: Any, *args: Any, **kwargs: Any) -> Any:
            # On PyTorch many of Keras's operations compute in float32 in a model of float64.
            size = ROUNDING.get(keras.backend.result_type(getattr(model, "compute_dtype", "float32")), 2.0**-23)
            for variable in model.trainable_variables:
                value = np.asarray(keras.ops.convert_to_numpy(variable), "float64")
                noise = random.normal(size=(2, *value.shape)) * size
                variable.assign(value * (1 + noise[0]) + 0.1 * noise[1])
            return original(model, *args, **kwargs)

        return make

    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        stack.enter_context(mock.patch.object(trainer, name, disturbed(getattr(trainer, name))))


def _disturb_gradients(stack: contextlib.ExitStack, random: np.random.Generator) -> None:
    """Change gradients by the rounding of the largest of them: one that is zero, because what samples contribute
    cancels out, need not be zero in another order of the sum."""
    original = keras.optimizers.Optimizer.apply

    def apply(optimizer: Any, gradients: Sequence[Any], trainable_variables: Any = None) -> Any:
        sizes = [keras.ops.max(keras.ops.abs(each)) for each in gradients if _is_dense(each)]
        largest = functools.reduce(keras.ops.maximum, [keras.ops.cast(size, "float32") for size in sizes], 0.0)

        def disturbed(gradient: Any) -> Any:
            if not _is_dense(gradient):
                return gradient
            rounding = ROUNDING.get(keras.backend.standardize_dtype(gradient.dtype), 2.0**-23)
            noise = (random.normal(size=tuple(gradient.shape)) * rounding).astype("float32")
            return gradient + keras.ops.cast(largest * noise, gradient.dtype)

        return original(optimizer, list(map(disturbed, gradients)), trainable_variables)

    stack.enter_context(mock.patch.object(keras.optimizers.Optimizer, "apply", apply))


def _is_dense(gradient: Any) -> bool:
    """Whether it is neither absent nor, on TensorFlow, rows of an embedding."""
    return gradient is not None and type(gradient).__name__ != "IndexedSlices"


def _forget() -> None:
    """Nothing of a program shall remain for the next one."""
    sys.modules.pop(MODULE, None)
    linecache.clearcache()
    keras.saving.get_custom_objects().clear()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session()
    gc.collect()


def _use_one_thread() -> None:
    backend = keras.backend.backend()
    if backend == "torch" or "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)
    if backend == "tensorflow" or "tensorflow" in sys.modules:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
