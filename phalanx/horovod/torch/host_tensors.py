"""PyTorch's tensors as NumPy arrays and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from phalanx.devices.pinned_memory import copy_to_device, copy_to_host

Array = np.ndarray[Any, Any]


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether `to_host` gives a view of the tensor itself, rather than of a copy."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def to_host(tensor: torch.Tensor) -> Array:
    """The tensor's values as a contiguous array: its own memory where that can be."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not shares_memory(tensor):
        tensor = tensor.cpu().contiguous()
    if tensor.dtype is torch.bfloat16:  # NumPy does not know it
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def all_to_host(tensors: Sequence[torch.Tensor]) -> list[Array]:
    """As `to_host` of each, and from a GPU much faster."""
    return [to_host(tensor) for tensor in copy_to_host(tensors)]


def over(array: Array) -> torch.Tensor:
    """A tensor of the array's memory."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # the former makes rows of single numbers
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_host(array: Array, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the array's memory (a copy, on another device)."""
    return copy_to_device([over(array)], like.device)[0]


def tensors_of(arrays: Sequence[Array], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `from_host` of each."""
    return [from_host(array, tensor) for array, tensor in zip(arrays, like, strict=True)]
