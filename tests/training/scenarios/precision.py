"""Dtype policies: 16 bits differ in their last digits with the order of summation, so these compare loosely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from tests.training.scenarios.common import compiled, fitted
from tests.training.scenarios.registry import Setting, scenario


@contextmanager
def _policy(name: str) -> Iterator[None]:
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_dtype_policy(before)


@scenario(tolerance=2e-2)
def mixed_float16(setting: Setting) -> dict[str, Any]:
    with _policy("mixed_float16"):
        assert isinstance(compiled(setting).optimizer, keras.optimizers.LossScaleOptimizer)
        # A scale at which nothing overflows: gradients of a few samples are larger than their mean over all, so at
        # the edge replicas leave out other first steps than one process. No accuracy: one sample at the edge is 3 %.
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=256.0)
        return fitted(compiled(setting, optimizer=optimizer))


@scenario(tolerance=5e-2)
def mixed_bfloat16(setting: Setting) -> dict[str, Any]:
    with _policy("mixed_bfloat16"):
        return fitted(compiled(setting))


@scenario(tolerance=1e-1)
def bfloat16_weights(setting: Setting) -> dict[str, Any]:
    """The gradients themselves have 16 bits."""
    with _policy("bfloat16"):
        return fitted(compiled(setting))


@scenario(tolerance=1e-5, backends=("tensorflow", "torch"))
def float64(setting: Setting) -> dict[str, Any]:
    with _policy("float64"):
        return fitted(compiled(setting))
