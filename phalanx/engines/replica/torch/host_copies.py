"""PyTorch's tensors as arrays on the host, and back. On CPUs both are views of the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from phalanx.devices import pinned_memory
from phalanx.engines.step_layout import StepLayout

Array = np.ndarray[Any, Any]


def to_host(tensor: Any) -> Array:
    """Return the tensor's values on the host, as a view if they are there. bfloat16 has the dtype of ml_dtypes."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        # NumPy has no bfloat16: the bits are passed as integers of the same width.
        bits: Array = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    values: Array = tensor.numpy()
    return values


def from_host(array: Array, device: Any = None) -> Any:
    """Return a tensor over the array's memory, or a copy of it on another device."""
    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor if device is None else tensor.to(device)


def all_to_host(tensors: Sequence[Any]) -> list[Array]:
    """Copy tensors to the host as `to_host` does, but much faster from a GPU. Sparse gradients become dense."""
    dense = [tensor if tensor.layout is torch.strided else tensor.to_dense() for tensor in tensors]
    return [to_host(tensor) for tensor in pinned_memory.copy_to_host(dense)]


def all_from_host(arrays: Sequence[Array], device: Any) -> list[Any]:
    """Copy arrays to a device as `from_host` does, but much faster to a GPU."""
    return pinned_memory.copy_to_device([from_host(array) for array in arrays], device)


def cut_merged(layout: StepLayout, flats: Sequence[Array], device: Any) -> tuple[list[Array], list[Any]]:
    """Return the arrays inside a layout's flat buffers, also as tensors: over their memory, or copied to a GPU."""
    arrays: list[Array] = layout.unpack(flats)
    if device.type == "cpu":
        return arrays, [from_host(array) for array in arrays]
    return arrays, layout.unpack(all_from_host(flats, device))
