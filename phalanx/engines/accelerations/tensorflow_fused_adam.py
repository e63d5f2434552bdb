"""Keras's Adam and AdamW on TensorFlow, in one pass over the memory.

Purpose: Keras updates each weight in a dozen operations, each a pass over the memory. TensorFlow has one kernel for all
of it (`ResourceApplyAdam`).

Measured: the passes took a quarter of the step of a small model on a CPU.

Same numbers: the kernel has Keras's formula (Kingma & Ba 2014, section 2, the remark after algorithm 1),

    w -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)

and the results are equal to rounding: `tests/engines/test_tensorflow_fused_adam.py` compares weights and optimizer
state after 20 steps. Classes other than Keras's own, AMSGrad, half precision (in which Keras rounds intermediate
values, and the kernel does not), sparse gradients and gradients of unknown shape are left to Keras.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from phalanx.engines.accelerations.adam_coefficients import has_plain_coefficients
from phalanx.keras_compat.patching import overridden_methods

_DTYPES = ("float32", "float64")


@contextmanager
def fused_adam(optimizer: Any) -> Iterator[None]:
    """Context in which `optimizer` updates in one pass, if it is Keras's Adam. No effect on others."""
    update_step = optimizer.update_step
    if not _is_plain_adam(optimizer):
        yield
        return

    def update(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if variable.dtype not in _DTYPES or isinstance(gradient, tf.IndexedSlices) or gradient.shape != variable.shape:
            update_step(gradient, variable, learning_rate)
            return
        # During tracing. Adam's own code looks the slots up in the same way.
        place = optimizer._get_variable_index(variable)
        dtype = keras.backend.standardize_dtype(variable.dtype)
        step = tf.cast(optimizer.iterations + 1, dtype)
        beta_1, beta_2 = (tf.constant(beta, dtype) for beta in (optimizer.beta_1, optimizer.beta_2))
        # As in Keras: tf.cast first rounds a Python number to float32, also on the way to float64.
        power_1, power_2 = (tf.pow(tf.cast(beta, dtype), step) for beta in (optimizer.beta_1, optimizer.beta_2))
        root = _root_of_share(optimizer.beta_2, dtype)
        tf.raw_ops.ResourceApplyAdam(
            var=_handle(variable),
            m=_handle(optimizer._momentums[place]),
            v=_handle(optimizer._velocities[place]),
            beta1_power=power_1,
            beta2_power=power_2,
            # The kernel computes lr sqrt(1 - b2^t) / (1 - b1^t) from the powers.
            lr=tf.cast(learning_rate, dtype) * root,
            beta1=beta_1,
            beta2=beta_2,
            epsilon=tf.constant(optimizer.epsilon * root, dtype),
            grad=tf.cast(gradient, dtype),
        )

    with overridden_methods(optimizer, update_step=update):
        yield


def _is_plain_adam(optimizer: Any) -> bool:
    kind = type(optimizer)
    return (
        kind in (keras.optimizers.Adam, keras.optimizers.AdamW)
        and "update_step" not in vars(optimizer)
        and not optimizer.amsgrad
        and has_plain_coefficients(optimizer)
    )


def _root_of_share(beta_2: float, dtype: str) -> float:
    """Return the ratio of the root of the kernel's `v` to that of Keras.

    The kernel computes 1 - b2 from the rounded b2, which for 0.999 in float32 is 1.3e-5 smaller than Keras's 0.001. A
    learning rate and an epsilon scaled by the same ratio give Keras's update. A b2 that is rounded to 1 gives no
    update, and no root to divide by.
    """
    share = 1.0 - float(np.asarray(beta_2, dtype))
    return math.sqrt(share / (1.0 - beta_2)) if share else 1.0


def _handle(variable: Any) -> Any:
    """Return the resource of a Keras variable, or of the TensorFlow variable inside one."""
    return (variable.value if isinstance(variable, keras.Variable) else variable).handle
