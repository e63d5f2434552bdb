"""Keras's Adam on TensorFlow, in one pass over the memory.

Keras updates each weight in a dozen operations, each a pass of its own; TensorFlow has one kernel for all of it
(`ResourceApplyAdam`), with the same formula (Kingma & Ba 2014, section 2, the remark after algorithm 1):

    w -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from phalanx.keras_compat.patching import overridden_methods

_DTYPES = ("float32", "float64")
"""What nearly all weights are; in half precision Keras rounds in between, and the kernel does not."""


@contextmanager
def fused(optimizer: Any) -> Iterator[None]:
    """Let `optimizer` use the kernel in what is traced inside, if it computes as Keras's Adam does; else change
    nothing."""
    update_step = optimizer.update_step
    if getattr(update_step, "__func__", None) is not keras.optimizers.Adam.update_step or optimizer.amsgrad:
        yield
        return

    def update(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if variable.dtype not in _DTYPES or isinstance(gradient, tf.IndexedSlices):
            update_step(gradient, variable, learning_rate)
            return
        place = optimizer._get_variable_index(variable)
        own = optimizer._momentums[place], optimizer._velocities[place]
        dtype = variable.dtype
        step = tf.cast(optimizer.iterations + 1, dtype)
        beta_1, beta_2 = (tf.constant(beta, dtype) for beta in (optimizer.beta_1, optimizer.beta_2))
        tf.raw_ops.ResourceApplyAdam(
            var=_handle(variable),
            m=_handle(own[0]),
            v=_handle(own[1]),
            beta1_power=tf.pow(beta_1, step),
            beta2_power=tf.pow(beta_2, step),
            lr=tf.cast(learning_rate, dtype),
            beta1=beta_1,
            beta2=beta_2,
            epsilon=tf.constant(optimizer.epsilon, dtype),
            grad=tf.cast(gradient, dtype),
        )

    with overridden_methods(optimizer, update_step=update):
        yield


def _handle(variable: Any) -> Any:
    """Of a variable of Keras, or TensorFlow's own inside of it."""
    return (variable.value if isinstance(variable, keras.Variable) else variable).handle
