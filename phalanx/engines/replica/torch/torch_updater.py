"""Updates variables on PyTorch, on a parameter server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.engines.accelerations import registry
from phalanx.engines.accelerations.torch_fused_adam import apply_in_one_pass
from phalanx.engines.replica.torch.accelerated_updates import AcceleratedUpdates
from phalanx.engines.replica.torch.host_copies import from_host, to_host
from phalanx.engines.updater import BackendUpdater


class TorchUpdater(BackendUpdater):
    """See `phalanx.engines.updater.Updater`."""

    shares_buffers = True

    def _prepare(self) -> None:
        self._fuses = registry.is_enabled("torch_fused_adam")
        self._updates = AcceleratedUpdates()

    def apply(self, gradients: Sequence[Any]) -> None:
        devices = [variable.value.device for variable in self.variables]
        # On a CPU, these are views of the arrays that arrived. A server reuses their memory after the update.
        tensors = list(map(from_host, gradients, devices))
        with torch.no_grad():
            if self._fuses and apply_in_one_pass(self.optimizer, tensors, self.variables):
                return
            with self._updates(self.optimizer):
                self.optimizer.apply(tensors, self.variables)

    def values(self) -> list[Any]:
        return [to_host(variable.value) for variable in self.variables]

    def load(self, values: Mapping[int, Any], state: Mapping[int, Any]) -> None:
        with torch.no_grad():
            for number, value in values.items():
                self.variables[number].value.copy_(from_host(np.asarray(value)))
            for number, value in state.items():
                self.optimizer.variables[number].value.copy_(from_host(np.asarray(value)))

    def fetch(self, values: Sequence[int], state: Sequence[int]) -> tuple[list[Any], list[Any]]:
        own = self.optimizer.variables
        return [to_host(self.variables[n].value) for n in values], [to_host(own[n].value) for n in state]
