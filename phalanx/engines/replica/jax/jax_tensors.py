"""JAX's arrays in custom training loops: conversion to and from host arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.engines.replica.jax.split_step import host_call
from phalanx.engines.tensors import Gradient, HostFunction, Shape, Tensors, same_shape
from phalanx.keras_compat.keras_internals import in_stateless_scope


class JaxTensors(Tensors):
    """See `phalanx.engines.tensors.Tensors`."""

    outside_of_traces = staticmethod(jax.ensure_compile_time_eval)

    @property
    def merges_in_apply(self) -> bool:
        # `stateless_apply` runs inside compiled functions, which cannot wait for others: the caller has merged.
        return not in_stateless_scope()

    def are_unmerged(self, gradients: Sequence[Any], weights: Sequence[Any]) -> bool:
        # A trace cannot merge. Merged gradients enter it as arguments. Anything that it computes from the weights comes
        # from the samples of this replica.
        names = {_name(weight) for weight in weights if isinstance(weight, jax.core.Tracer)} - {None}
        seen: set[int] = set()
        left = [gradient for gradient in gradients if isinstance(gradient, jax.core.Tracer)]
        while left:
            tracer = left.pop()
            if id(tracer) not in seen:
                seen.add(id(tracer))
                if _name(tracer) in names:
                    return True
                left += getattr(getattr(tracer, "parent", None), "in_tracers", ())
        return False

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
        if not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
            return [self.from_host(array) for array in function([np.asarray(tensor) for tensor in tensors])]
        tensors = [jnp.asarray(tensor) for tensor in tensors]
        found: list[Any] = [None] * len(tensors)
        for differs in (True, False):
            chosen = [i for i, each in enumerate(tensors) if jnp.issubdtype(each.dtype, jnp.floating) is differs]
            if chosen:
                own = [tensors[i] for i in chosen]
                forms = [jax.ShapeDtypeStruct(_known(shape_of(each.shape), each.shape), each.dtype) for each in own]
                results = host_call(function, own, forms, gradient if differs else None)
                for i, result in zip(chosen, results, strict=True):
                    found[i] = result
        return found


def _name(tracer: Any) -> int | None:
    """Return what identifies a value of a trace; None if this version of JAX does not expose it."""
    value = getattr(tracer, "val", None)
    return None if value is None else id(value)


def _known(shape: Shape, of_argument: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a result, with the argument's length where the result's is unknown before the call."""
    return tuple(now if then is None else then for now, then in zip(of_argument, shape, strict=True))
