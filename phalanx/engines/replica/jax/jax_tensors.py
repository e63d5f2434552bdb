"""JAX's arrays in custom training loops: to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.engines.tensors import Gradient, HostFunction, Shape, same_shape
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.keras_internals import in_stateless_scope


class JaxTensors:
    """See `phalanx.engines.tensors.Tensors`."""

    @property
    def merges_in_apply(self) -> bool:
        # `stateless_apply` runs inside compiled functions, which cannot wait for others: who calls it has merged.
        return not in_stateless_scope()

    def from_host(self, array: Any) -> Any:
        return jnp.array(array, copy=True)

    def call(
        self,
        function: HostFunction,
        tensors: Sequence[Any],
        *,
        shape_of: Callable[[Shape], Shape] = same_shape,
        gradient: Gradient | None = None,
    ) -> list[Any]:
        if any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
            raise UnsupportedError(
                "A value was merged over the replicas inside a function compiled by JAX. A compiled function cannot "
                "wait for other processes: compute the gradients in one jitted function, merge them with "
                "`strategy.reduce` or `get_replica_context().all_reduce` outside, and apply them in a second "
                "(examples/custom_loop_jax.py)."
            )
        return [self.from_host(array) for array in function([np.asarray(tensor) for tensor in tensors])]

    @staticmethod
    def failure_behind(error: BaseException) -> BaseException | None:
        return None  # errors come as they are

    @staticmethod
    def trace_apart(key: Callable[[], Hashable | None]) -> None:
        pass  # compiled functions merge nothing

    def reduce(self, thing: Any) -> Any:
        return NotImplemented
