"""A compiled function of a step, and the denominators that its losses need from the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from keras import tree

from phalanx.engines.engine import Batch, MergeProtocol
from phalanx.engines.loss_scales import loss_scales
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.global_losses import GloballyScaledLosses
from phalanx.keras_compat.model_state import samples
from phalanx.keras_compat.step_means import WeightedStepMeans


class _DenominatorsNeeded(Exception):
    """A step has a loss whose scale was not passed."""


class CompiledStep:
    """A compiled step whose losses and step means are those of the global batch (`global_losses`, `step_means`).

    A compiled function cannot wait for other processes. So if a loss needs it, a function that runs before computes the
    denominators: the same step, of which XLA keeps only what the denominators need.

    Args:
        function: what is compiled; its last argument is the batch.
        jit: compiles a function; see `ModelCompiler.jit`.
        merge: sums denominators over the ranks.
        donate: indices of the arguments of `function` that it may overwrite.
        leave: where `function` leaves its results; None: on the device.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        jit: Callable[..., Callable[..., Any]],
        merge: MergeProtocol,
        donate: tuple[int, ...] = (),
        leave: Any = None,
    ) -> None:
        self._function = function
        self._jit = jit
        self._merge = merge
        self._run = jit(self._trace, tuple(1 + number for number in donate), leave)
        self._denominators: Callable[..., Any] | None = None
        self._prepared: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def prepare(self, share: float, *arguments: Any) -> Callable[[], None] | None:
        """Trace the step for arguments like these, and return its compilation, which any thread may do.

        Returns: None if there is nothing to compile, or if other ranks' denominators are needed.
        """
        if self._denominators is not None or not hasattr(self._run, "lower"):
            return None
        lowered = self._run.lower(np.float32(share), *arguments, ())
        key = _sizes(arguments[-1])

        def compile_it() -> None:
            self._prepared[key] = lowered.compile()

        return compile_it

    def __call__(self, share: float, *arguments: Any) -> Any:
        share_of_step = np.float32(share)
        if self._prepared and (prepared := self._prepared.get(_sizes(arguments[-1]))):
            return prepared(share_of_step, *arguments, ())
        if self._denominators is None:
            try:
                return self._run(share_of_step, *arguments, ())
            except _DenominatorsNeeded:
                self._denominators = self._jit(self._trace_denominators)
        try:
            denominators = self._denominators(*arguments)
        except jax.errors.UnexpectedTracerError as error:
            raise UnsupportedError(
                "A loss's mask or sample weights are computed inside a transformation of JAX (scan, remat, ...) or "
                "from weights of the model; what the loss divides by cannot be known over all replicas before the "
                "step. Reduce the loss with reduction='sum' and divide by a constant instead."
            ) from error
        own = [None if denominator is None else np.asarray(denominator) for denominator in denominators]
        return self._run(share_of_step, *arguments, loss_scales(own, self._merge, share))

    def _trace(self, share: Any, *arguments: Any) -> Any:
        *arguments_of_step, given = arguments
        left = iter(given)
        scaled = 0

        def scale_of(denominator: Any) -> Any:
            nonlocal scaled
            scaled += 1
            return next(left) if len(given) else 1.0

        with GloballyScaledLosses(scale_of, samples(arguments_of_step[-1])), WeightedStepMeans(lambda: share):
            results = self._function(*arguments_of_step)
        if scaled and not len(given):
            raise _DenominatorsNeeded  # only now: Keras would keep the added losses of an interrupted step
        return results

    def _trace_denominators(self, *arguments: Any) -> list[Any]:
        found: list[Any] = []

        def note(denominator: Any) -> float:
            found.append(denominator)
            return 1.0

        with GloballyScaledLosses(note, samples(arguments[-1])):
            self._function(*arguments)
        return found


def _sizes(data: Batch) -> tuple[Any, ...]:
    return tuple(None if leaf is None else leaf.shape for leaf in tree.flatten(data))
