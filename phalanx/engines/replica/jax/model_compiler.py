"""Compiles functions of a model on JAX, and decides where they leave their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from phalanx.engines.replica.jax.host_memory import DETERMINISTIC_OPTIONS, pinned_memory


class ModelCompiler:
    """Compiles functions of one model, unless it is compiled with `jit_compile=False` or runs eagerly.

    Attributes:
        compiles: Whether it compiles functions.
        pinned: The host's pinned memory, for results that go to the host; None if JAX computes in host memory.
    """

    def __init__(self, model: Any) -> None:
        self.compiles = bool(model.jit_compile) and not model.run_eagerly
        self.pinned = pinned_memory()

    @property
    def deterministic_options(self) -> dict[str, Any] | None:
        """Compiler options for what all ranks must compute identically to the last bit."""
        return None if self.pinned is None else DETERMINISTIC_OPTIONS

    def jit(
        self,
        function: Callable[..., Any],
        donate: tuple[int, ...] = (),
        out_shardings: Any = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a function.

        Args:
            function: The function to compile.
            donate: Indices of the arguments that it may overwrite.
            out_shardings: Shardings of the results; None: they stay on the device.
            options: Compiler options.
        """
        if not self.compiles:
            return function

        compiled: Callable[..., Any] = jax.jit(
            without_traces(function), donate_argnums=donate, out_shardings=out_shardings, compiler_options=options
        )
        return compiled

    def first_result_to_host(self, kind: Any) -> Any:
        """Return the `out_shardings` of a function that returns such a named tuple, the first part on the host."""
        return None if self.pinned is None else kind(self.pinned, *[None] * (len(kind._fields) - 1))


def without_traces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that JAX has no traces of it.

    JAX finds traces by the function, and a method remains equal to itself when the model is compiled again, and perhaps
    changed, or receives batches of another structure. Its old trace, which lives as long as anything holds the old
    engine, must not be found.
    """

    @functools.wraps(function)
    def traced_here(*arguments: Any) -> Any:
        return function(*arguments)

    return traced_here
