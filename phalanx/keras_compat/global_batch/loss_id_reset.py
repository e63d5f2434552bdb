"""Prevents layers from mistaking a loss that another layer adds for one of their own.

In a `stateless_call`, a layer identifies its losses (from `add_loss` and activity regularizers) by their `id`, and
keeps the ids from one call to the next. A loss that another layer has added since may have the same id, and Keras drops
it with the losses of the earlier call: occasionally from a step that runs eagerly, permanently from a compiled step.

Uses `Layer._flatten_layers`, `Layer._loss_ids` and the stateless scopes. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope


def clearing_loss_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Layer.stateless_call` to clear the ids first. A call within another one keeps the ids of the outer one."""

    @functools.wraps(original)
    def stateless_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (in_stateless_scope() and get_stateless_scope().collect_losses):
            for layer in self._flatten_layers():
                layer._loss_ids.clear()
        return original(self, *args, **kwargs)

    return stateless_call
