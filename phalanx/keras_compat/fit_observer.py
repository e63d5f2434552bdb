"""Tells of Keras's own `fit`, also in programs that use nothing of Phalanx but its launcher.

Patches `fit` of Keras's trainer. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from phalanx.keras_compat.keras_internals import keras_trainer
from phalanx.keras_compat.patching import Patches

_patches = Patches()


def observe_fit(on_fit: Callable[[Any], object]) -> None:
    """Call `on_fit(model)` before each `fit` that Keras itself runs, from now on."""

    def observed(fit: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fit)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            on_fit(model)
            return fit(model, *args, **kwargs)

        return method

    _patches.replace(keras_trainer(), "fit", observed)


def stop_observing() -> None:
    """Restore Keras's own `fit`."""
    _patches.restore()
