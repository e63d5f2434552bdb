"""Merges gradients where a custom `train_step` calls `optimizer.apply`.

Overrides `apply` on the optimizer object. An optimizer that is not one of the model's (in a global variable) is caught
by the wrapper that `trainer_hook` puts around every `apply`, which calls `external_optimizer_merge`.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.global_batch.global_gradients import GlobalGradients
from phalanx.keras_compat.model_state import optimizers
from phalanx.keras_compat.patching import overridden_methods, override_methods

MergeGradients = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Takes gradients and their weights, and returns the values to apply."""

_external_optimizers = threading.local()


@contextmanager
def merging_applies(
    model: Any,
    merge: MergeGradients,
    fused: Callable[[Any], AbstractContextManager[None]],
    assign: Callable[[Sequence[Any], Sequence[Any]], None] | None = None,
) -> Iterator[None]:
    """Context in which optimizers merge their gradients before they apply them.

    Args:
        model: The model whose optimizers merge. Optimizers of other objects merge too; see `external_optimizer_merge`.
        merge: Merges the gradients.
        fused: Creates a context that makes an optimizer use a fused kernel.
        assign: Called instead of the optimizers' own update, with the result of `merge` and the weights.
    """
    with ExitStack() as stack:
        for optimizer in optimizers(model):
            stack.enter_context(_merging_apply(optimizer, merge, assign or optimizer.apply))
            stack.enter_context(fused(optimizer))
        stack.enter_context(_merging_external_optimizers(_refuse_external_optimizer if assign else merge))
        yield


def external_optimizer_merge() -> MergeGradients | None:
    """Return the merge for an optimizer being applied that is not the model's; None outside of a train step."""
    return getattr(_external_optimizers, "merge", None)


def redirect_apply(optimizer: Any, apply: Callable[[Sequence[Any], Sequence[Any] | None], None]) -> None:
    """Replace an optimizer's `apply` (and so `apply_gradients` and `stateless_apply`) permanently.

    Args:
        optimizer: A Keras optimizer.
        apply: Called with the gradients, and the variables passed with them or None.
    """

    def redirected(grads: Any, trainable_variables: Any = None) -> None:
        apply(list(grads), None if trainable_variables is None else list(trainable_variables))

    override_methods(optimizer, apply=redirected)


@contextmanager
def _merging_external_optimizers(merge: MergeGradients | None) -> Iterator[None]:
    before = external_optimizer_merge()
    _external_optimizers.merge = merge
    try:
        yield
    finally:
        _external_optimizers.merge = before


def _refuse_external_optimizer(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    raise UnsupportedError(
        "train_step applies an optimizer that is not the model's. With parameter servers the servers update, so pass "
        "it to compile()."
    )


def _merging_apply(optimizer: Any, merge: MergeGradients, apply: Callable[..., Any]) -> AbstractContextManager[None]:
    own = GlobalGradients(optimizer)
    apply_gradients = optimizer.apply_gradients

    def merged(gradients: list[Any], weights: list[Any]) -> list[Any]:
        return merge(own.to_merge(gradients, weights), weights)

    def merged_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        if trainable_variables is None:
            # As in Keras for `apply(gradients)`: the variables that the optimizer was built for.
            trainable_variables = optimizer._trainable_variables
        weights = list(trainable_variables)
        gradients = merged(list(grads), weights)
        # `trainer_hook` wraps `apply` as well, and must not merge these gradients again.
        with _merging_external_optimizers(None):
            return apply(gradients, weights)

    def merged_apply_gradients(grads_and_vars: Any) -> Any:
        """Merge before the program's `apply_gradients`. The `apply` that it calls must not merge again."""
        grads, weights = map(list, zip(*grads_and_vars, strict=True))
        gradients = merged(grads, weights)
        with _merging_external_optimizers(None), overridden_methods(optimizer, apply=apply):
            return apply_gradients(zip(gradients, weights, strict=True))

    # Keras's own `apply_gradients` only calls `apply`, which merges. One that a program has overridden may compute with
    # gradients, and must see merged ones.
    methods: dict[str, Callable[..., Any]] = {**own.methods, "apply": merged_apply}
    if type(optimizer).apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
        methods["apply_gradients"] = merged_apply_gradients
    return overridden_methods(optimizer, **methods)
