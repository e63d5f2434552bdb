"""Compression of tensors that travel between ranks, the same for all frameworks.

Any class with the two static methods of `Compressor` is a compressor and can be passed as `compression=`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Compressor:
    """Converts a tensor before a collective and back after it."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the received tensor in the form that the tensor had before `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16; ranks add them in float32."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (_cast(tensor, "float16"), tensor.dtype) if "float" in str(tensor.dtype) else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else _cast(tensor, ctx)


class Compression:
    """The choices for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor


def run_compressed(compression: Any, tensors: Sequence[Any], reduce: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Compress tensors, call `reduce` with them, and decompress the results.

    Args:
        compression: A compressor.
        tensors: Tensors of any framework.
        reduce: Function that takes the compressed tensors and returns the same number of tensors.
    """
    if compression is NoneCompressor:
        return list(reduce(list(tensors)))
    packed = [compression.compress(tensor) for tensor in tensors]
    reduced = reduce([tensor for tensor, _ in packed])
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, packed, strict=True)]


def _cast(tensor: Any, dtype: Any) -> Any:
    """Cast a tensor to another dtype: "float16", or a dtype of its framework."""
    torch = sys.modules.get("torch")  # no walrus: AutoGraph may convert this, and does not support it
    if torch is not None and torch.is_tensor(tensor):
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    if hasattr(tensor, "astype"):  # NumPy, JAX
        with np.errstate(over="ignore"):  # loss scaling handles gradients that overflow
            return tensor.astype(dtype)
    return sys.modules["tensorflow"].cast(tensor, dtype)
