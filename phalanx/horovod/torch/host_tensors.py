"""Converts PyTorch tensors to NumPy arrays and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from phalanx.devices.pinned_memory import copy_to_device, copy_to_host
from phalanx.errors import UnsupportedError

Array = np.ndarray[Any, Any]


def shares_memory(tensor: torch.Tensor) -> bool:
    """Return whether `to_host` returns a view of the tensor itself, not of a copy."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def to_host(tensor: torch.Tensor) -> Array:
    """Return the tensor's values as a contiguous array: the tensor's memory if possible."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not shares_memory(tensor):
        tensor = tensor.cpu().contiguous()
    if tensor.dtype is torch.bfloat16:  # unknown to NumPy
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def all_to_host(tensors: Sequence[torch.Tensor]) -> list[Array]:
    """Apply `to_host` to all tensors; from a GPU, this is much faster than separate calls.

    Raises: TypeError for anything but tensors; UnsupportedError for sparse ones.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"This takes PyTorch tensors; got {type(tensor).__name__}. See also allgather_object.")
        if tensor.is_sparse:
            raise UnsupportedError(
                "This takes dense tensors; got a sparse one. Use sparse_allreduce_async, or tensor.to_dense()."
            )
    return [to_host(tensor) for tensor in copy_to_host(tensors)]


def _tensor_view(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray converts scalars to rows
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensors_from_arrays(arrays: Sequence[Array], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Convert new arrays to tensors that share their memory, or to copies on the devices of the inputs.

    The counts that follow the result of an alltoall have no input and stay on the CPU, as in Horovod.
    """
    tensors = [_tensor_view(array) for array in arrays]
    for index, own in enumerate(inputs):
        if not own.is_cpu:
            tensors[index] = copy_to_device([tensors[index]], own.device)[0]
    return tensors


def write_back(arrays: Sequence[Array], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, with the values that were written to their arrays from `to_host`."""
    for tensor, array in zip(tensors, arrays, strict=True):
        if not shares_memory(tensor):
            tensor.detach().copy_(_tensor_view(array))
    return list(tensors)
