"""Keras's Adam on PyTorch, in one pass over the memory.

Keras updates the weights in a dozen passes (`torch._foreach_*`), a fifth of a small model's step on a CPU;
PyTorch has one kernel for all of it, on CPUs and on NVIDIA's GPUs. The two differ in where epsilon stands (Kingma & Ba
2014, section 2, the remark after algorithm 1):

    Keras    w -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)
    PyTorch  w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps')

so that eps' = eps / sqrt(1 - b2^t) makes them the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch

from phalanx.keras_compat.patching import overridden_methods
from phalanx.keras_compat.torch_internals import Adam, AdamW

# What the kernel can be given; all weights of one model nearly always are float32.
_DTYPES = (torch.float32, torch.float64)
_DEVICES = ("cpu", "cuda")


@contextmanager
def fused(optimizer: Any) -> Iterator[None]:
    """Let `optimizer` use the kernel, if it computes as Keras's Adam does; else change nothing."""
    update = getattr(optimizer, "_parallel_update_step", None)
    if update is None or update.__func__ is not Adam._parallel_update_step or optimizer.amsgrad:
        yield
        return

    def update_step(gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        if not _update_in_one_pass(optimizer, gradients, variables, learning_rate):
            update(gradients, variables, learning_rate)

    with overridden_methods(optimizer, _parallel_update_step=update_step):
        yield


def updated(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
    """As `optimizer.apply`, if that comes to the kernel and a count; else False, and nothing is done.

    What Keras does around them takes as long as the kernel does for a small model.
    """
    comes_to_it = (
        type(optimizer) in (Adam, AdamW)
        and optimizer.built
        and isinstance(optimizer._learning_rate, keras.Variable)
        and not optimizer.amsgrad
        and not optimizer.use_ema
        and not optimizer.gradient_accumulation_steps
        and not optimizer.loss_scale_factor
        and optimizer.weight_decay is None
        and optimizer.clipnorm is optimizer.clipvalue is optimizer.global_clipnorm is None
        and not any(variable.constraint or variable.overwrite_with_gradient for variable in variables)
        and _update_in_one_pass(optimizer, gradients, variables, optimizer._learning_rate.value)
    )
    if comes_to_it:
        optimizer._iterations.value.add_(1)
    return comes_to_it


def _update_in_one_pass(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> bool:
    """One update, or False and none if there is a tensor that the kernel does not take."""
    places = [optimizer._get_variable_index(variable) for variable in variables]
    weights = [variable.value.detach() for variable in variables]
    momentums = [optimizer._momentums[place].value for place in places]
    velocities = [optimizer._velocities[place].value for place in places]
    dtype, device = weights[0].dtype, weights[0].device
    tensors = [*weights, *gradients, *momentums, *velocities]
    if dtype not in _DTYPES or device.type not in _DEVICES:
        return False
    if not all(t.dtype is dtype and t.device == device and t.is_contiguous() for t in tensors):
        return False
    iterations = optimizer.iterations  # an integer tensor while gradients are accumulated, else a variable
    step = int(getattr(iterations, "value", iterations)) + 1
    torch._fused_adam_(
        weights,
        list(gradients),
        momentums,
        velocities,
        [],
        [torch.full((), float(step), device=device)] * len(weights),
        lr=float(learning_rate),
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        weight_decay=0.0,  # Keras has applied its own
        eps=optimizer.epsilon / math.sqrt(1.0 - optimizer.beta_2**step),
        amsgrad=False,
        maximize=False,
    )
    return True
