"""Buffers of PyTorch modules among the layers (batch-norm statistics), with the interface of Keras variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from phalanx.engines.replica.torch.host_copies import from_host


class ModuleBuffer:
    """A buffer of a module, with the path, shape, dtype, value and `assign` of a Keras variable.

    It is looked up at every use, because a module may replace it with another tensor.
    """

    def __init__(self, module: Any, name: str, path: str) -> None:
        self._module = module
        self._name = name
        self.path = path

    @property
    def value(self) -> Any:
        return getattr(self._module, self._name)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        return str(self.value.dtype).removeprefix("torch.")

    def assign(self, value: Any) -> None:
        with torch.no_grad():
            self.value.copy_(value if isinstance(value, torch.Tensor) else from_host(np.asarray(value)))


def buffers(model: Any) -> list[ModuleBuffer]:
    """Return all buffers of a Keras model's layers, each once, in the order of the layers."""
    found: dict[int, ModuleBuffer] = {}
    for layer in model._flatten_layers():
        for inside, module in layer.named_modules():
            for name, tensor in module.named_buffers(recurse=False):
                path = "/".join(part for part in (layer.name, *inside.split("."), name) if part)
                # By the current tensor: a module that is in two layers counts once.
                found.setdefault(id(tensor), ModuleBuffer(module, name, path))
    return list(found.values())
