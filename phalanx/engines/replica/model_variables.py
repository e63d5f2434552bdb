"""The state of a model on backends that keep it in its variables: TensorFlow and PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.keras_compat import model_state

Array = np.ndarray[Any, Any]


class ModelVariables(ABC):
    """The values of a model's variables; see `phalanx.engines.engine.ModelValues`. There is nothing to fetch or to put
    back."""

    in_variables = True

    def begin(self) -> None:  # noqa: B027
        pass

    def end(self) -> None:  # noqa: B027
        pass

    @abstractmethod
    def copies(self, variables: Sequence[Any]) -> list[Any]:
        """Tensors that keep the present values."""

    @abstractmethod
    def read(self, variables: Sequence[Any]) -> list[Array]:
        """Copies of the present values in the host's memory."""

    @abstractmethod
    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Give variables new values, tensors of the backend or arrays."""


def variables_of_optimizers(model: Any) -> list[Any]:
    """The variables that a custom `train_step` has changed if it fails after its gradients were merged and applied."""
    optimizers = model_state.optimizers(model)
    return [*model.trainable_variables, *(v for optimizer in optimizers for v in optimizer.variables)]
