"""Keras's Adam and AdamW on PyTorch, in one pass over the memory.

Purpose: Keras updates the weights in a dozen passes (`torch._foreach_*`). PyTorch has one kernel for all of it, on CPUs
and on NVIDIA GPUs.

Measured: the passes took a fifth of the step of a small model on a CPU.

Same numbers: the two differ in the position of epsilon (Kingma & Ba 2014, section 2, the remark after algorithm 1),

    Keras    w -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)
    PyTorch  w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps')

and in the precision of 1 - b^t: Keras computes it in that of the weights, which for b2 = 0.999 is off by 1e-5 in the
first steps, and PyTorch in float64. So the kernel gets another epsilon and another rate, with Keras's own factor a:

    eps' = eps / sqrt(1 - b2^t)
    lr' = a (1 - b1^t) / sqrt(1 - b2^t), where a = lr sqrt(1 - b2^t) / (1 - b1^t) in Keras's precision

`tests/engines/test_torch_fused_adam.py` compares weights and optimizer state after 1, 3 and 20 steps. Classes other
than Keras's own, AMSGrad, half precision, and tensors that the kernel would read differently from PyTorch's operations
(sparse, of other shapes, with gaps) are left to Keras.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import keras
import numpy as np
import torch

from phalanx.engines.accelerations.adam_coefficients import has_plain_coefficients
from phalanx.engines.accelerations.torch_flush_denormals import DTYPES, denormals_as_zero, has_safe_epsilon
from phalanx.keras_compat.patching import overridden_methods
from phalanx.keras_compat.torch_internals import Adam, AdamW

_DEVICES = ("cpu", "cuda")


@contextmanager
def fused_adam(optimizer: Any) -> Iterator[None]:
    """Context in which `optimizer` updates in one pass, if it is Keras's Adam. No effect on others."""
    update = getattr(optimizer, "_parallel_update_step", None)
    # A method that the program has set on this object has no `__func__`.
    is_keras = getattr(update, "__func__", None) is Adam._parallel_update_step
    if update is None or not is_keras or not _is_plain_adam(optimizer):
        yield
        return

    def update_step(gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        if not _update_in_one_pass(optimizer, gradients, variables, learning_rate):
            update(gradients, variables, learning_rate)

    with overridden_methods(optimizer, _parallel_update_step=update_step):
        yield


def apply_in_one_pass(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
    """Run `optimizer.apply` if it only does this update; otherwise return False with nothing changed.

    For a small model, Keras's code around the update takes as long as the kernel.
    """
    # In this order: cheap checks first, and last the update, which changes the weights.
    has_updated = (
        optimizer.built
        and isinstance(optimizer._learning_rate, keras.Variable)
        and not optimizer.use_ema
        and not optimizer.gradient_accumulation_steps
        and not optimizer.loss_scale_factor
        and optimizer.weight_decay is None
        and optimizer.clipnorm is optimizer.clipvalue is optimizer.global_clipnorm is None
        and not any(variable.constraint or variable.overwrite_with_gradient for variable in variables)
        and _is_plain_adam(optimizer)
        and _update_in_one_pass(optimizer, gradients, variables, optimizer._learning_rate.value)
    )
    if has_updated:
        optimizer._iterations.value.add_(1)
    return has_updated


def _is_plain_adam(optimizer: Any) -> bool:
    return type(optimizer) in (Adam, AdamW) and not optimizer.amsgrad and has_plain_coefficients(optimizer)


def _update_in_one_pass(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> bool:
    """Update once; or return False, with nothing changed, if there is a tensor that the kernel does not accept."""
    places = [optimizer._get_variable_index(variable) for variable in variables]
    weights = [variable.value.detach() for variable in variables]
    momentums = [optimizer._momentums[place].value for place in places]
    velocities = [optimizer._velocities[place].value for place in places]
    dtype, device = weights[0].dtype, weights[0].device
    # A variable that occurs twice needs two updates, one after the other.
    if dtype not in DTYPES or device.type not in _DEVICES or len(set(places)) != len(places):
        return False
    # The kernel reads memory linearly, so the layout of all four must be the same. Gradients come from anywhere.
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient.layout is not torch.strided or gradient.shape != weight.shape:
            return False
    tensors = [*weights, *gradients, *momentums, *velocities]
    if not all(t.dtype is dtype and t.device == device and t.is_contiguous() for t in tensors):
        return False
    iterations = optimizer.iterations  # an integer tensor while gradients are accumulated, else a variable
    step = int(getattr(iterations, "value", iterations)) + 1
    corrections = [1.0 - beta**step for beta in (optimizer.beta_1, optimizer.beta_2)]
    factor = _factor_of_keras(optimizer, learning_rate, step, weights[0])
    with denormals_as_zero(has_safe_epsilon(optimizer)):
        torch._fused_adam_(
            weights,
            list(gradients),
            momentums,
            velocities,
            [],
            [torch.full((), float(step), device=device)] * len(weights),
            lr=factor * corrections[0] / math.sqrt(corrections[1]),
            beta1=optimizer.beta_1,
            beta2=optimizer.beta_2,
            weight_decay=0.0,  # Keras has already applied it
            eps=optimizer.epsilon / math.sqrt(corrections[1]),
            amsgrad=False,
            maximize=False,
        )
    return True


@lru_cache
def _betas(beta_1: float, beta_2: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor([beta_1, beta_2], dtype=dtype, device=device)


def _factor_of_keras(optimizer: Any, learning_rate: Any, step: int, like: torch.Tensor) -> float:
    """Return Keras's factor for the momentum. `b^t` comes from the same function as in Keras, because another may round
    differently in the last bit, which is one part in 10,000 of `1 - b^t`."""
    dtype = like.dtype
    betas = _betas(optimizer.beta_1, optimizer.beta_2, dtype, like.device)
    powers = torch.pow(betas, torch.full((), step, dtype=dtype, device=like.device))
    number: Any = np.float32 if dtype is torch.float32 else np.float64
    first, second = map(number, (1 - powers).tolist())
    return float(number(float(learning_rate)) * np.sqrt(second) / first)
