"""Reports training by Keras itself, also in programs that use only the launcher of Phalanx.

Patches `fit` and `train_on_batch` of Keras's trainer. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from phalanx.keras_compat.patching import Patches, defining_class

_patches = Patches()


def observe_fit(on_fit: Callable[[Any, str], object]) -> None:
    """Call `on_fit(model, method_name)` before each `fit` and `train_on_batch` of Keras, from now on."""

    def observed(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            on_fit(model, original.__name__)
            return original(model, *args, **kwargs)

        return method

    for name in ("fit", "train_on_batch"):
        _patches.replace(defining_class(keras.Model, name), name, observed)
