"""PyTorch's tensors in custom training loops: conversion to and from host arrays, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.engines.replica.torch.host_copies import from_host, to_host
from phalanx.engines.tensors import Gradient, HostFunction, Shape, Tensors, same_shape
from phalanx.keras_compat.torch_internals import get_device

Array = np.ndarray[Any, Any]


class TorchTensors(Tensors):
    """See `phalanx.engines.tensors.Tensors`."""

    def from_host(self, array: Array) -> Any:
        return from_host(np.array(array, copy=True), get_device())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call(
        self,
        function: HostFunction,
        tensors: Sequence[Any],
        *,
        shape_of: Callable[[Shape], Shape] = same_shape,
        gradient: Gradient | None = None,
    ) -> list[Any]:
        tensors = [
            tensor if isinstance(tensor, torch.Tensor) else self.from_host(np.asarray(tensor)) for tensor in tensors
        ]
        if gradient is None:
            return _on_host(function, tensors)
        return list(_Differentiable.apply(function, gradient, *tensors))  # type: ignore[no-untyped-call]


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]
    """A host function with its gradient."""

    @staticmethod
    def forward(context: Any, function: HostFunction, gradient: Gradient, *tensors: Any) -> Any:
        context.floating = floating = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]
        shapes = [tuple(tensors[i].shape) for i in floating]
        context.gradient = lambda flowing: gradient(flowing, shapes)
        others, count = {i: tensor for i, tensor in enumerate(tensors) if i not in floating}, len(tensors)

        def again(upstream: list[Array], _: list[Shape]) -> list[Array]:
            given = iter(upstream)
            every = function([to_host(others[i]) if i in others else next(given) for i in range(count)])
            return [every[i] for i in floating]

        # The gradient of the gradient: the function of the incoming gradients, with the other tensors unchanged.
        context.again = again
        results = _on_host(function, tensors)
        context.mark_non_differentiable(*[result for result in results if not result.is_floating_point()])
        return tuple(results)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        # The function is linear, and so is its gradient, whose own gradient is the function.
        grads = [gradients[i] for i in context.floating]
        flowing = iter(_Differentiable.apply(context.gradient, context.again, *grads))
        return None, None, *[next(flowing) if i in context.floating else None for i in range(len(gradients))]


def _on_host(function: HostFunction, tensors: Sequence[Any]) -> list[Any]:
    results = function([to_host(tensor) for tensor in tensors])
    return [from_host(np.array(array), tensor.device) for array, tensor in zip(results, tensors, strict=True)]
