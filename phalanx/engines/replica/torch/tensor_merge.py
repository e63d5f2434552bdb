"""The merge of a step on PyTorch: tensors to the host, merged, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from phalanx.engines.engine import MergeProtocol
from phalanx.engines.replica.torch.host_copies import all_to_host, cut_merged
from phalanx.engines.step_layout import StepLayout, gradient_weights

Array = np.ndarray[Any, Any]


class TensorMerge:
    """Merges tensors over the ranks.

    Attributes:
        share: this rank's share of the global batch, of the step that runs.
    """

    def __init__(self, merge: MergeProtocol, device: Any) -> None:
        self._merge = merge
        self._device = device
        self.share = 1.0

    def merge(self, layout: StepLayout, arrays: Sequence[Array]) -> tuple[list[Array], list[Any]]:
        """The merged arrays, and the same as tensors; they are overwritten by a later merge."""
        return cut_merged(layout, self._merge(layout, arrays, self.share), self._device)

    def merge_gradients(self, gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        """The gradients of some weights, merged, or what replaces them; see `merging_applies`."""
        if self._merge.updates:
            gradients = complete(gradients, weights)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        arrays = all_to_host([gradients[i] for i in present])
        merged = list(gradients)
        if present:
            layout = StepLayout.of(arrays, gradient_weights([weights[i] for i in present]))
            for i, tensor in zip(present, self.merge(layout, arrays)[1], strict=True):
                merged[i] = tensor
        return merged


def complete(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """The gradients, zero where the loss does not depend on a weight."""
    return [
        torch.zeros_like(weight.value) if gradient is None else gradient
        for gradient, weight in zip(gradients, weights, strict=True)
    ]
