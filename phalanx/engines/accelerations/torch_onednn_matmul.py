"""Keras's matrix products on PyTorch, computed with the faster of PyTorch's two libraries.

Purpose: on CPUs, PyTorch multiplies float32 matrices with Intel's MKL, which uses at most AVX2 on processors of other
vendors. PyTorch also has oneDNN, for convolutions, and oneDNN uses everything that the processor has.

Measured: on an AMD EPYC with AVX-512, a product takes half the time (784 x 64 times 64 x 256: 0.14 ms instead of 0.24).
The step of an MLP at batch 512 took a fifth less time.

Same numbers: both compute the product in float32 and differ in the order of additions, so results and gradients of any
order are equal to rounding; `tests/engines/test_torch_onednn_matmul.py` compares them. Only products of Keras's layers
(`keras.ops.matmul` with a matrix on the right) are replaced, and only while a step of `fit`, `evaluate` or `predict`
runs. Everything that gives the product another meaning is left to PyTorch: other dtypes, autocast, a lower float32
precision, transformations of `torch.func`, compilation, and modes that watch operations. So is everything if the
program disables oneDNN (`torch.backends.mkldnn.enabled = False`).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from phalanx.keras_compat.patching import PatchedFunction
from phalanx.keras_compat.torch_internals import KerasVariable, keras_numpy

MIN_FLOP = 6_000_000
"""On smaller products, the overhead in Python costs more than oneDNN saves."""


@functools.cache
def has_faster_products() -> bool:
    """Whether oneDNN is known to multiply faster than MKL on this host."""
    capable = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return capable and both and hasattr(torch.ops.mkldnn, "_linear_pointwise") and _has_amd_processor()


def _has_amd_processor() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False


class OneDNNMatmul(PatchedFunction):
    """A context in which oneDNN computes Keras's products. No effect where oneDNN is not faster, or inside another such
    context, because a step may predict."""

    def __init__(self) -> None:
        super().__init__(keras_numpy, "matmul", self._matmul)
        # One entry for each context that is active, as steps may be nested.
        self._in_use: list[bool] = []

    def __enter__(self) -> None:
        is_inside = isinstance(getattr(keras_numpy.matmul, "__self__", None), OneDNNMatmul)
        self._in_use.append(not is_inside and has_faster_products() and _computes_in_float32())
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


def _computes_in_float32() -> bool:
    """Whether the program allows oneDNN to multiply, with full float32 precision."""
    flags: Any = torch.backends.mkldnn
    if not flags.enabled:
        return False
    if hasattr(flags, "matmul"):
        return bool(flags.matmul.fp32_precision in ("none", "ieee"))
    return str(torch.get_float32_matmul_precision()) == "highest"  # PyTorch before 2.9


def _tensor(value: Any) -> Any:
    """Return the value if it is a plain float32 tensor on the CPU, else None."""
    tensor = value.value if isinstance(value, KerasVariable) else value
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype is torch.float32
    return tensor if plain and tensor.device.type == "cpu" and tensor.layout is torch.strided else None


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply two float32 matrices on the CPU. Differentiable any number of times."""
    is_small = 2 * left.numel() * right.shape[1] < MIN_FLOP
    if is_small or left.shape[1] != right.shape[0] or _has_other_meaning():
        return left @ right
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        differentiable: torch.Tensor = _Product.apply(left, right)
        return differentiable
    return _multiply(left, right)


def _has_other_meaning() -> bool:
    """Whether `left @ right` would now do more than multiply and record for reverse differentiation: under autocast, in
    a transformation of `torch.func`, or in a mode that watches or replaces operations."""
    return (
        torch.is_autocast_enabled("cpu")
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
    )


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    multiply = torch.ops.mkldnn._linear_pointwise.default
    result: torch.Tensor = multiply(_dense(left), _dense(right).t(), None, "none", [], "")
    return result


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix without gaps and repetitions, such as the gradients of sums have. With these, oneDNN takes 1000
    times as long."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        return _multiply(left, right)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        left, right = ctx.saved_tensors
        of_left, of_right = ctx.needs_input_grad
        multiply = product if torch.is_grad_enabled() else _multiply  # `product` can be differentiated again
        return multiply(gradient, right.t()) if of_left else None, multiply(left.t(), gradient) if of_right else None
