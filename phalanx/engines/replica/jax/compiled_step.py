"""A compiled function of a step, which may need the other ranks in the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from phalanx.engines.engine import Merge
from phalanx.engines.merge_collectives import MergeCollectives
from phalanx.engines.replica.jax.jax_tensors import JaxTensors
from phalanx.engines.replica.jax.split_step import CompiledHostCallError, SplitStep
from phalanx.keras_compat.global_batch.global_losses import GloballyScaledLosses
from phalanx.keras_compat.global_batch.step_collectives import StepScope
from phalanx.keras_compat.global_batch.step_means import WeightedStepMeans
from phalanx.keras_compat.model_state import samples


class CompiledStep:
    """A compiled step whose losses and step means are those of the global batch (`global_losses`, `step_means`).

    It is one compiled function until a trace of it requests the other ranks, and pieces from then on (`split_step`).

    Args:
        function: The function to compile. Its last argument is the batch.
        jit: Compiles a function; see `ModelCompiler.jit`.
        merge: Communicates with the other ranks.
        donate: Indices of the arguments that `function` may overwrite.
        out_shardings: Shardings of the results; None: they stay on the device.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        jit: Callable[..., Callable[..., Any]],
        merge: Merge,
        donate: tuple[int, ...] = (),
        out_shardings: Any = None,
    ) -> None:
        self._function = function
        self._jit = jit
        self._out_shardings = out_shardings
        self._collectives = MergeCollectives(merge, JaxTensors().call)
        # Plus 1: the share comes before the arguments.
        self._run = jit(self._trace, tuple(1 + number for number in donate), out_shardings)
        # Whether a trace has requested the other ranks. Never reset: such a step is not tried as one function again.
        self._is_split = False
        # By kind of trace, and with gathered rows by the global number of samples, on which shapes depend.
        self._pieces: dict[tuple[Any, ...], SplitStep] = {}
        # Written by the thread that compiles ahead, read by the one that trains. Dictionary assignment needs no lock.
        self._compiled_ahead: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def compile_ahead(self, share: float, *arguments: Any) -> Callable[[], None] | None:
        """Trace the step for arguments like these, and return its compilation, which any thread may do.

        Returns: None if there is nothing to compile, or if it is compiled in pieces.
        """
        if self._is_split or not hasattr(self._run, "lower"):
            return None
        try:
            lowered = self._run.lower(np.float32(share), *arguments)
        except CompiledHostCallError:
            self._is_split = True
            return None
        key = kind_of_trace(arguments)

        def compile_it() -> None:
            self._compiled_ahead[key] = lowered.compile()

        return compile_it

    def __call__(self, share: float, *arguments: Any) -> Any:
        self._collectives.share = share
        share_of_step = np.float32(share)
        if self._compiled_ahead and (compiled := self._compiled_ahead.get(kind_of_trace(arguments))):
            return compiled(share_of_step, *arguments)
        if not self._is_split:
            try:
                return self._run(share_of_step, *arguments)
            # Raised during compilation: nothing has run, and donated arguments are intact.
            except CompiledHostCallError:
                self._is_split = True
        own = samples(arguments[-1])
        key = kind_of_trace(arguments)
        if self._collectives.has_gathered:
            everyone = self._collectives.global_samples(own)
            self._collectives.samples = everyone, own
            key = (*key, everyone)
        pieces = self._pieces.get(key)
        if pieces is None:
            pieces = self._pieces[key] = SplitStep(
                self._trace, (share_of_step, *arguments), self._jit, self._out_shardings
            )
        return pieces(share_of_step, *arguments)

    def _trace(self, share: Any, *arguments: Any) -> Any:
        with (
            GloballyScaledLosses(samples(arguments[-1])),
            WeightedStepMeans(lambda: share),
            StepScope(self._collectives),
        ):
            return self._function(*arguments)


def kind_of_trace(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the key of a step's trace, which agrees with JAX's and is the same inside the trace.

    Args:
        arguments: Arguments of the step: lists with the values of variables, and last its batch.
    """
    *state, data = arguments
    leaves, structure = jax.tree.flatten(data)
    of_batch = [(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves]
    # For the state, the numbers of values, which a program may change without compiling again (`metrics` as a
    # property). As many values of other shapes need other variables, and these need a new engine.
    return structure, *map(len, state), *of_batch
