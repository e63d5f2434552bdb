"""The contract for a backend's tensors outside of models, which custom training loops pass to a strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from phalanx.data import DistributedDataset
from phalanx.engines.engine import GradientRows
from phalanx.keras_compat.variables.merged_variables import VariableMerger

Array = np.ndarray[Any, Any]
HostFunction = Callable[[list[Array]], list[Array]]
RowGather = Callable[[Sequence[GradientRows]], list[GradientRows]]
Shape = Sequence[int | None]
"""Lengths of the axes; None for a length that is not known before the call."""
Gradient = Callable[[list[Array], list[tuple[int, ...]]], list[Array]]
"""The gradient of a host function. It takes the gradients with respect to the results and the shapes of the arguments,
and returns the gradients with respect to the arguments."""


def same_shape(shape: Shape) -> Shape:
    return shape


class Tensors(ABC):
    """Converts between a backend's tensors and host arrays, and calls host functions from where tensors live.

    Methods for which most backends need nothing do nothing here.
    """

    distributed_dataset: type[DistributedDataset] = DistributedDataset
    """The class of this replica's part of a dataset, which compiled functions may be able to iterate over."""

    @property
    def merges_in_apply(self) -> bool:
        """Whether an `optimizer.apply` inside `strategy.run` can merge its gradients first at this moment."""
        return True

    def are_unmerged(self, gradients: Sequence[Any], weights: Sequence[Any]) -> bool:
        """Whether gradients that `optimizer.apply` cannot merge now were just computed from the weights, and so cannot
        have been merged."""
        return False

    @abstractmethod
    def from_host(self, array: Array) -> Any:
        """Return a tensor with a copy of the values."""

    @abstractmethod
    def call(
        self,
        function: HostFunction,
        tensors: Sequence[Any],
        *,
        shape_of: Callable[[Shape], Shape] = same_shape,
        gradient: Gradient | None = None,
    ) -> list[Any]:
        """Call a function of the tensors' values on the host, also inside a compiled function if the backend can.

        Args:
            function: Takes arrays, and returns as many with the same dtypes.
            tensors: The function's arguments.
            shape_of: Returns the shape of a result, given the shape of the argument.
            gradient: The function's gradient, for backends that differentiate through host functions; None if none.

        Returns: The results as tensors.
        """

    def merge_gradients(self, merge: HostFunction, gather: RowGather, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of a custom training loop, merged over the replicas.

        Args:
            merge: Sums dense gradients.
            gather: Returns the rows of all replicas, for row gradients; see `Merge.gather`.
            gradients: This replica's gradients.
        """
        return self.call(merge, gradients)

    @staticmethod
    def find_cause(error: BaseException) -> BaseException | None:
        """Return the error of a host function that the backend has wrapped in this one; None if there is none."""
        return None

    @staticmethod  # noqa: B027 (most trace nothing)
    def add_trace_key(key: Callable[[], Hashable | None]) -> None:
        """Trace compiled functions separately for each value of `key()`, if a trace keeps decisions made in Python:
        whether to merge may depend on the key."""

    @staticmethod  # noqa: B027 (most have no such functions)
    def count_replicas(contexts: Any) -> None:
        """Make the backend's functions that divide by the number of replicas get it from `contexts`."""

    @staticmethod
    def outside_of_traces() -> AbstractContextManager[None]:
        """Context in which code computes at once, even while a function that contains it is traced."""
        return nullcontext()

    @staticmethod
    def variable_merge_scope(current_merger: Callable[[], VariableMerger | None]) -> AbstractContextManager[None]:
        """Context in which new variables of the backend itself (not Keras's) belong to the `current_merger()` at their
        creation, if there are any."""
        return nullcontext()

    def pickle_reduce(self, thing: Any) -> Any:
        """Return the `__reduce_ex__` value for an object of the backend that the backend itself cannot pickle;
        NotImplemented for everything else, including dense tensors."""
        return NotImplemented
