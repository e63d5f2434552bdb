"""Matrix products of Keras on PyTorch, by the faster of PyTorch's two libraries.

On CPUs PyTorch multiplies float32 matrices with Intel's MKL, which uses no more than AVX2 on processors that are not
Intel's. PyTorch has oneDNN as well, for convolutions, and that uses what the processor has: on an AMD EPYC with AVX-512
a product takes it half the time (784 x 64 times 64 x 256: 0.14 ms instead of 0.24).

Products of Keras's layers only (`keras.ops.matmul` with a matrix on the right), forth and back, and only while a step
of `fit`, `evaluate` or `predict` runs: what a program multiplies itself it multiplies as ever. Who switches oneDNN off
in PyTorch (`torch.backends.mkldnn.enabled = False`) has MKL for all.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from phalanx.keras_compat.patching import PatchedFunction
from phalanx.keras_compat.torch_internals import KerasVariable, keras_numpy

LEAST_FLOP = 6_000_000
"""For smaller products, what has to be done in Python takes longer than what is saved."""


@functools.cache
def has_faster_products() -> bool:
    """Whether oneDNN multiplies faster than MKL on this host."""
    capable = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return capable and both and hasattr(torch.ops.mkldnn, "_linear_pointwise") and _is_of_amd()


def _is_of_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False


class OneDNNMatmul(PatchedFunction):
    """A context in which Keras's products are made so. Without effect where they are not faster, and inside of itself:
    a step may predict."""

    def __init__(self) -> None:
        super().__init__(keras_numpy, "matmul", self._matmul)
        self._in_use: list[bool] = []

    def __enter__(self) -> None:
        is_inside = isinstance(getattr(keras_numpy.matmul, "__self__", None), OneDNNMatmul)
        self._in_use.append(has_faster_products() and torch.backends.mkldnn.enabled and not is_inside)
        if self._in_use[-1]:
            super().__enter__()

    def __exit__(self, *error: object) -> None:
        if self._in_use.pop():
            super().__exit__(*error)

    def _matmul(self, x1: Any, x2: Any) -> Any:
        if not torch.compiler.is_compiling():
            left, right = _tensor(x1), _tensor(x2)
            if left is not None and right is not None and right.ndim == 2 and left.ndim >= 2 and left.numel():
                if left.ndim == 2:
                    return product(left, right)
                return product(left.reshape(-1, left.shape[-1]), right).reshape(*left.shape[:-1], right.shape[1])
        return self.original(x1, x2)


def _tensor(value: Any) -> Any:
    """A float32 tensor on the CPU that is nothing more special; else None."""
    tensor = value.value if isinstance(value, KerasVariable) else value
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype is torch.float32
    return tensor if plain and tensor.device.type == "cpu" and tensor.layout is torch.strided else None


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of two float32 matrices on the CPU; differentiable as often as one likes."""
    if 2 * left.numel() * right.shape[1] < LEAST_FLOP or left.shape[1] != right.shape[0] or _is_transformed():
        return left @ right
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        differentiable: torch.Tensor = _Product.apply(left, right)
        return differentiable
    return _multiplied(left, right)


def _is_transformed() -> bool:
    """Whether something else than reverse differentiation is done to what is computed now (`torch.func`)."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _multiplied(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    multiply = torch.ops.mkldnn._linear_pointwise.default
    result: torch.Tensor = multiply(_dense(left), _dense(right).t(), None, "none", [], "")
    return result


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """Without gaps and repetitions, for which oneDNN takes a thousand times as long (gradients of sums are such)."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        return _multiplied(left, right)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        left, right = ctx.saved_tensors
        of_left, of_right = ctx.needs_input_grad
        multiply = product if torch.is_grad_enabled() else _multiplied  # the first can be differentiated once more
        return multiply(gradient, right.t()) if of_left else None, multiply(left.t(), gradient) if of_right else None
