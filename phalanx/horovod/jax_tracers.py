"""Detects values in functions that JAX compiles, which cannot wait for other processes."""

from __future__ import annotations

from typing import Any

from phalanx.errors import UnsupportedError


def is_tracer(value: Any) -> bool:
    """Return whether a value belongs to a function that JAX compiles or transforms."""
    import jax

    return isinstance(value, jax.core.Tracer)


def refuse_tracer(value: Any) -> None:
    """Raise UnsupportedError if a value belongs to a function that JAX compiles or transforms."""
    if is_tracer(value):
        raise UnsupportedError(
            "A collective of hvd was called inside a function that JAX compiles or transforms (jit, grad, vmap, scan). "
            "Such a function cannot wait for other processes: compute the gradients in one jitted function, call hvd "
            "outside, and apply them in a second jitted function."
        )
