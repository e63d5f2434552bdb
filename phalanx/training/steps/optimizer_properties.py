"""Properties of a model's optimizer that training steps use: accumulation, loss scales, step counts."""

from __future__ import annotations

from typing import Any

import keras

from phalanx.keras_compat import model_state
from phalanx.keras_compat.global_batch.global_gradients import is_overwritten
from phalanx.keras_compat.model_state import inner_optimizer


def accumulation_steps(model: Any) -> int:
    """Return over how many steps each replica may accumulate gradients locally; 1 to merge every step."""
    optimizer = getattr(model, "optimizer", None)  # none before `compile`
    # Two optimizers may accumulate over different steps, and a custom `train_step` may apply more than once. A dynamic
    # loss scale skips the very step that overflows, so it must see merged gradients at every step, as must a custom
    # `apply`, which may clip them.
    simple = (
        optimizer is not None
        and len(model_state.optimizers(model)) == 1
        and not model_state.overrides(model, "train_step")
        and not scales_dynamically(optimizer)
        and not _applies_itself(optimizer)
    )
    return (getattr(optimizer, "gradient_accumulation_steps", None) or 1) if simple else 1


def _applies_itself(optimizer: Any) -> bool:
    """Whether the program customizes how gradients are applied, in a class or on this one object."""
    methods = [getattr(optimizer, name) for name in ("apply", "apply_gradients", "stateless_apply")]
    return any(not (method.__module__ or "").startswith(("keras.", "phalanx.")) for method in methods)


def accumulators(optimizer: Any) -> list[tuple[Any, Any]]:
    """Return an unwrapped optimizer's weights, with their gradient accumulators; empty before it is built.

    Float8 scales have such variables, too, which stay zero: the optimizer overwrites these weights at every step.
    """
    pairs = zip(optimizer._trainable_variables, getattr(optimizer, "_accumulated_gradients", ()), strict=False)
    return [(variable, accumulator) for variable, accumulator in pairs if not is_overwritten(variable)]


def constant_loss_scale(model: Any) -> float:
    """Return the constant factor of the loss; see `loss_scale` for one that changes."""
    optimizer = inner_optimizer(getattr(model, "optimizer", None))
    return float(getattr(optimizer, "loss_scale_factor", None) or 1.0)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return `inner_optimizer`, and the optimizers among which it divides the weights (Keras's `MultiOptimizer`)."""
    inner = inner_optimizer(optimizer)
    return [inner, *getattr(inner, "optimizers", ())]


def set_step_count(optimizer: Any, steps: int) -> None:
    """Set the optimizer's count of steps, which counts batches even if gradients are accumulated (Keras's `iterations`
    then counts updates, and cannot be assigned)."""
    inner_optimizer(optimizer)._iterations.assign(steps)


def scales_dynamically(optimizer: Any) -> bool:
    """Whether the factor of the loss changes."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def loss_scale(optimizer: Any) -> Any:
    """Return the variable by which the loss is multiplied; None if it is not scaled, or by a constant."""
    return optimizer.dynamic_scale if scales_dynamically(optimizer) else None
