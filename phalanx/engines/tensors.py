"""The contract for tensors of a backend outside models: what custom loops hand to a strategy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
HostFunction = Callable[[list[Array]], list[Array]]
Shape = Sequence[int | None]
"""Lengths; None where one is not known before the call."""
Gradient = Callable[[list[Array], list[tuple[int, ...]]], list[Array]]
"""Of a host function: gets the gradients with respect to its results and the shapes of its arguments, and returns the
gradients with respect to these."""


def same_shape(shape: Shape) -> Shape:
    return shape


class Tensors(Protocol):
    """Converts between a backend's tensors and host arrays, and calls host functions from where tensors live."""

    @property
    def merges_in_apply(self) -> bool:
        """Whether an `optimizer.apply` that happens now, inside `strategy.run`, can merge its gradients first."""
        ...

    def from_host(self, array: Array) -> Any:
        """A tensor with its own copy of the values."""
        ...

    def call(
        self,
        function: HostFunction,
        tensors: Sequence[Any],
        *,
        shape_of: Callable[[Shape], Shape] = same_shape,
        gradient: Gradient | None = None,
    ) -> list[Any]:
        """`function` of the tensors' values on the host, as tensors; inside a compiled function where that can be.

        Args:
            function: gets arrays, returns as many with the same dtypes.
            shape_of: the shape of a result by that of the argument.
            gradient: for backends that differentiate through host functions. None: there is none.
        """
        ...

    @staticmethod
    def failure_behind(error: BaseException) -> BaseException | None:
        """The error of a host function of which the backend has made this one of its own; None if there is none."""
        ...

    @staticmethod
    def trace_apart(key: Callable[[], Hashable | None]) -> None:
        """Have functions that the backend compiles traced for each value of `key` apart, if what a trace decides in
        Python would hold for others: merging may depend on the key."""
        ...

    def reduce(self, thing: Any) -> Any:
        """How a thing of the backend's own is pickled where the backend itself does not know: as `__reduce_ex__` says
        it. NotImplemented for everything else, dense tensors among it."""
        ...
