"""Conditions under which a step depends on its samples alone, so that steps of a batch and of its parts compare.

* Keras's random numbers (dropout, noise, latent vectors) are the same for each sample of a batch, and in each run.
* Batch normalization uses the statistics that it has collected.
* Optimizers subtract gradients times one number: adaptive ones divide gradients that are pure rounding error by their
  own size.
* Steps run eagerly on TensorFlow and PyTorch, which do not compile them for a single call.

Patches functions of `keras.src.backend.*.random` and `BatchNormalization.call`; overrides `_backend_update_step` of
optimizers. Tested with Keras 3.15.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras import ops

from phalanx.keras_compat.model_state import optimizers
from phalanx.keras_compat.patching import PatchedFunction, defining_class, overridden_methods

LARGEST_CHANGE = 1e-2
"""The largest change of a weight in one update."""


class DeterministicSteps:
    """A context in which steps of a model run under these conditions.

    Args:
        model: A compiled model.
        on_optimizer: Called with the variables of an optimizer that the step applies and that is not among the model's.
        keeps_python_state: Whether state kept by a step's Python code persists, as it does if steps are not compiled.

    Attributes:
        optimizers: The optimizers that steps are known to apply.
    """

    def __init__(
        self, model: Any, on_optimizer: Callable[[Sequence[Any]], None], *, keeps_python_state: bool = True
    ) -> None:
        self.keeps_python_state = keeps_python_state
        self._model = model
        self._on_optimizer = on_optimizer
        # Those whose update is replaced. Optimizers that a step creates or finds elsewhere are added when they are
        # first applied.
        self.optimizers: list[Any] = []
        self._stack = ExitStack()
        self._draws = 0

    def __enter__(self) -> DeterministicSteps:
        with ExitStack() as self._stack:
            enter = self._stack.enter_context
            enter(running_eagerly(self._model))
            enter(contextlib.redirect_stdout(io.StringIO()))  # a step's output should appear once
            for patch in self._random_functions():
                enter(patch)
            enter(inference_batch_norm())
            for optimizer in optimizers(self._model):
                self._replace_update(optimizer)
                if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
                    self._replace_update(inner)
            enter(self._applies())
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Prepare for a step. Call before each."""
        self._draws = 0
        for optimizer in self.optimizers:
            if (scale := getattr(optimizer, "dynamic_scale", None)) is not None:
                scale.assign(1.0)  # with the initial scale, gradients overflow

    def optimizer_variables(self) -> list[Any]:
        """Return all variables that optimizers update themselves."""
        return [variable for optimizer in self.optimizers for variable in optimizer.variables]

    def _replace_update(self, optimizer: Any) -> None:
        self.optimizers.append(optimizer)
        self._stack.enter_context(overridden_methods(optimizer, _backend_update_step=self._update))

    def _applies(self) -> PatchedFunction:
        def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if all(each is not optimizer for each in self.optimizers):
                self._on_optimizer(optimizer.variables)
                self._replace_update(optimizer)
            return patch.original(optimizer, *args, **kwargs)

        patch = PatchedFunction(defining_class(keras.optimizers.Optimizer, "apply"), "apply", apply)
        return patch

    def _update(self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        known = [ops.cast(ops.convert_to_tensor(gradient), "float32") for gradient in gradients]
        # One number for all weights: gradients keep their proportions, and no weight moves by more than LARGEST_CHANGE.
        largest = _largest([ops.max(ops.abs(gradient)) for gradient in known if 0 not in gradient.shape])
        for gradient, variable in zip(known, variables, strict=True):
            variable.assign(variable.value - ops.cast(gradient * (LARGEST_CHANGE / largest), variable.dtype))

    def _random_functions(self) -> list[PatchedFunction]:
        home = importlib.import_module(f"keras.src.backend.{keras.backend.backend()}.random")

        def draw_per_row(name: str) -> Callable[..., Any]:
            original = getattr(home, name)

            def draw(shape: Any, *args: Any, **kwargs: Any) -> Any:
                self._draws += 1
                # The first axis is assumed to be the samples. All rows are equal, so a part of the batch sees what the
                # batch saw.
                row = (1, *shape[1:]) if len(shape) else shape
                named = dict(zip(_ARGUMENTS[name], args, strict=False)) | kwargs | {"seed": self._draws}
                return ops.broadcast_to(original(row, **named), shape)

            return draw

        draws = {name: draw_per_row(name) for name in _ARGUMENTS}

        def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
            shape = ops.shape(inputs)
            wanted = shape if noise_shape is None else noise_shape
            noise = [shape[axis] if size is None else size for axis, size in enumerate(wanted)]
            mask = ops.cast(draws["uniform"](noise) >= rate, inputs.dtype)
            return inputs * mask / max(1.0 - rate, 1e-7)

        others: dict[str, Callable[..., Any]] = {
            "dropout": dropout,
            "shuffle": lambda x, axis=0, seed=None: x,
            "categorical": _most_likely,
            "gamma": lambda shape, alpha, **_: ops.broadcast_to(_float(alpha), shape),
            "binomial": lambda shape, counts, probabilities, **_: ops.broadcast_to(
                _float(counts) * _float(probabilities), shape
            ),
            "beta": lambda shape, alpha, beta, **_: ops.broadcast_to(
                _float(alpha) / (_float(alpha) + _float(beta)), shape
            ),
        }
        return [PatchedFunction(home, name, function) for name, function in {**draws, **others}.items()]


_ARGUMENTS = {
    "normal": ("mean", "stddev", "dtype", "seed"),
    "truncated_normal": ("mean", "stddev", "dtype", "seed"),
    "uniform": ("minval", "maxval", "dtype", "seed"),
    "randint": ("minval", "maxval", "dtype", "seed"),
}
"""Arguments after the shape, for functions that draw numbers of a given shape."""


def _largest(sizes: Sequence[Any]) -> Any:
    found: Any = 1e-30
    for size in sizes:
        found = ops.maximum(size, found)
    return found


def _float(value: Any) -> Any:
    return ops.cast(ops.convert_to_tensor(value), "float32")


def _most_likely(logits: Any, num_samples: int, dtype: str = "int32", seed: Any = None) -> Any:
    best = ops.argmax(logits, axis=-1, keepdims=True)
    return ops.cast(ops.repeat(best, num_samples, axis=-1), dtype)


@contextmanager
def running_eagerly(model: Any) -> Iterator[None]:
    """Context in which steps of a model are not compiled."""
    if keras.backend.backend() == "jax":  # where each operation would be compiled by itself
        yield
        return
    before = model.jit_compile, model.run_eagerly
    model.jit_compile, model.run_eagerly = False, True
    try:
        with _calling_functions() if keras.backend.backend() == "tensorflow" else contextlib.nullcontext():
            yield
    finally:
        model.jit_compile, model.run_eagerly = before


@contextmanager
def _calling_functions() -> Iterator[None]:
    """Context in which a step that is a `tf.function` runs eagerly, too."""
    import tensorflow as tf

    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def inference_batch_norm() -> PatchedFunction:
    def call(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return patch.original(layer, inputs, training=False, mask=mask)

    patch = PatchedFunction(keras.layers.BatchNormalization, "call", call)
    return patch
