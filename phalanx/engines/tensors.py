"""The contract for a backend's tensors outside of models: what custom training loops pass to a strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from phalanx.data import DistributedDataset
from phalanx.engines.engine import GradientRows
from phalanx.keras_compat.variables.merged_variables import ReplicaParts

Array = np.ndarray[Any, Any]
HostFunction = Callable[[list[Array]], list[Array]]
RowGather = Callable[[Sequence[GradientRows]], list[GradientRows]]
Shape = Sequence[int | None]
"""Lengths of the axes; None where one is not known before the call."""
Gradient = Callable[[list[Array], list[tuple[int, ...]]], list[Array]]
"""The gradient of a host function: gets the gradients with respect to its results and the shapes of its arguments, and
returns the gradients with respect to its arguments."""


def same_shape(shape: Shape) -> Shape:
    return shape


class Tensors(ABC):
    """Converts between a backend's tensors and host arrays, and calls host functions from where tensors live.

    What most backends need nothing for does nothing here.
    """

    distributed_dataset: type[DistributedDataset] = DistributedDataset
    """The class of this replica's part of a dataset, which compiled functions may be able to iterate."""

    @property
    def merges_in_apply(self) -> bool:
        """Whether an `optimizer.apply` inside `strategy.run` can merge its gradients first, at this moment."""
        return True

    def are_of_own_samples(self, gradients: Sequence[Any], weights: Sequence[Any]) -> bool:
        """Whether gradients that `optimizer.apply` cannot merge now were computed from the weights just before, and so
        cannot have been merged."""
        return False

    @abstractmethod
    def from_host(self, array: Array) -> Any:
        """A tensor with a copy of the values."""

    @abstractmethod
    def call(
        self,
        function: HostFunction,
        tensors: Sequence[Any],
        *,
        shape_of: Callable[[Shape], Shape] = same_shape,
        gradient: Gradient | None = None,
    ) -> list[Any]:
        """Call a function of the tensors' values on the host; inside a compiled function where the backend can.

        Args:
            function: gets arrays, and returns as many with the same dtypes.
            tensors: its arguments.
            shape_of: returns the shape of a result, given the shape of the argument.
            gradient: its gradient, for backends that differentiate through host functions; None if it has none.

        Returns: the results as tensors.
        """

    def merge_gradients(self, merge: HostFunction, gather: RowGather, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of a custom training loop, merged over the replicas.

        Args:
            merge: sums dense gradients.
            gather: returns the rows of all replicas, for gradients that are single rows; see `Merge.gather`.
            gradients: this replica's.
        """
        return self.call(merge, gradients)

    @staticmethod
    def failure_behind(error: BaseException) -> BaseException | None:
        """The error of a host function that the backend has wrapped in this one; None if there is none."""
        return None

    @staticmethod  # noqa: B027 (most trace nothing)
    def trace_apart(key: Callable[[], Hashable | None]) -> None:
        """Trace compiled functions for each value of `key()` apart, where a trace keeps decisions made in Python:
        whether to merge may depend on the key."""

    @staticmethod  # noqa: B027 (most have no such functions)
    def count_replicas(contexts: Any) -> None:
        """Let the backend's own functions that divide by the number of replicas ask `contexts` for it."""

    @staticmethod
    def outside_of_traces() -> AbstractContextManager[None]:
        """A context in which code computes at once, also while a function that contains it is traced."""
        return nullcontext()

    @staticmethod
    def merging_variables(current_parts: Callable[[], ReplicaParts | None]) -> AbstractContextManager[None]:
        """A context in which variables of the backend itself (not Keras's) that are created belong to
        `current_parts()` of then, if there are any."""
        return nullcontext()

    def reduce(self, thing: Any) -> Any:
        """What `__reduce_ex__` would return for an object of the backend that the backend itself can't pickle;
        NotImplemented for everything else, including dense tensors."""
        return NotImplemented
