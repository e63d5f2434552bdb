"""How arrays are made smaller on the way: for NumPy, JAX and Keras. PyTorch and TensorFlow have their own.

A class with these two functions is a compressor; one's own will do.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class NoneCompressor:
    """Leaves arrays as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The array that travels, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The array as it was before `compress`, but with the merged values."""
        return tensor


class FP16Compressor:
    """Floating arrays travel as float16, and are summed in float32."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """See `NoneCompressor`."""
        dtype = str(tensor.dtype).rpartition(".")[2]
        return (_cast(tensor, "float16"), tensor.dtype) if "float" in dtype else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """See `NoneCompressor`."""
        return tensor if ctx is None else _cast(tensor, ctx)


class Compression:
    """The choices for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor


def _cast(tensor: Any, dtype: Any) -> Any:
    if hasattr(tensor, "astype"):
        with np.errstate(over="ignore"):  # infinite gradients are the business of who scales the loss
            return tensor.astype(dtype)
    import keras  # a tensor of TensorFlow or PyTorch, in a Keras program

    name = dtype if isinstance(dtype, str) else keras.backend.standardize_dtype(dtype)
    return keras.ops.cast(tensor, name)
