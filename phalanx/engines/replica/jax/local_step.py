"""The first half of a training step on JAX, in the form that the model's `train_step` needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.engines.engine import Merge
from phalanx.engines.replica.jax.compiled_step import CompiledStep
from phalanx.engines.replica.jax.model_compiler import ModelCompiler
from phalanx.engines.replica.jax.step_functions import AppliedResults, LocalResults, StepFunctions
from phalanx.keras_compat import model_state
from phalanx.keras_compat.observation.jax_gradient_probe import UnsupportedUpdateError


class LocalStep:
    """Computes this rank's part of a step.

    It ends when the gradients are known, unless a custom `train_step` turns out to need merged ones in the middle. Then
    it ends with the new weights.
    """

    def __init__(self, model: Any, merge: Merge, functions: StepFunctions, compiler: ModelCompiler) -> None:
        self._model = model
        self._once = merge.once_per_step
        # A step that is not compiled may affect the program, so it must not be tried.
        is_eager = not compiler.compiles and model_state.overrides(model, "train_step")
        self._applies = is_eager and not self._once
        jit, to_host = compiler.jit, compiler.first_result_to_host
        self._gradients = CompiledStep(functions.compute_gradients, jit, merge, out_shardings=to_host(LocalResults))
        self._applied = CompiledStep(functions.compute_and_apply, jit, merge, out_shardings=to_host(AppliedResults))

    def __call__(self, share: float, *arguments: Any) -> LocalResults | AppliedResults:
        if not self._applies:
            try:
                local: LocalResults = self._gradients(share, *arguments)
                return local
            except UnsupportedUpdateError:
                if self._once:
                    raise
                self._applies = True
                self._model._clear_losses()  # of the interrupted step
        applied: AppliedResults = self._applied(share, *arguments)
        return applied

    def compile_ahead(self, share: float, *arguments: Any) -> Callable[[], None] | None:
        """See `CompiledStep.compile_ahead`."""
        return None if self._applies else self._gradients.compile_ahead(share, *arguments)
