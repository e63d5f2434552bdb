"""Records which losses a program calls, and what its layers add to the loss.

Patches `Loss.__call__` and its overrides, and `Layer.add_loss`, during a call. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras import ops, tree

from phalanx.keras_compat.global_batch.global_losses import is_over_global_batch
from phalanx.keras_compat.patching import PatchedFunction, defining_class


def recorded_calls(model: Any, losses: Sequence[Any], compute: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Return the losses that `compute` calls, each with its arguments, except those that other losses call, and those
    of the global batch.

    Args:
        losses: Custom losses, which may have a custom `__call__` that does not call Keras's.
    """
    calls: list[tuple[Any, ...]] = []
    depth = 0

    def recording(kind: type) -> PatchedFunction:
        def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            nonlocal depth
            counts = not isinstance(loss, type(model._compile_loss))  # which only calls the others
            if counts and not depth and not is_over_global_batch():
                calls.append((loss, y_true, y_pred, sample_weight))
            depth += counts
            try:
                return patched.original(loss, y_true, y_pred, sample_weight)
            finally:
                depth -= counts

        patched = PatchedFunction(kind, "__call__", call)
        return patched

    with ExitStack() as patches:
        for kind in {keras.Loss, *(defining_class(type(loss), "__call__") for loss in losses)}:
            patches.enter_context(recording(kind))
        compute()
    return calls


@contextmanager
def recorded_additions() -> Iterator[list[tuple[Any, Any]]]:
    """Context that records the losses that layers add: each layer with the sum of what it adds."""
    added: list[tuple[Any, Any]] = []

    def note(layer: Any, loss: Any) -> None:
        added.extend((layer, ops.sum(each)) for each in tree.flatten(loss))

    with PatchedFunction(keras.layers.Layer, "add_loss", note):
        yield added
