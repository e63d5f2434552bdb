"""Callbacks as users pass them, and the base classes of Phalanx's callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from phalanx.errors import ConfigurationError

LOGGER_PACKAGES = frozenset(
    {"aim", "comet_ml", "dvclive", "mlflow", "neptune", "neptune_tensorflow_keras", "swanlab", "wandb"}
)
"""Packages whose Keras callbacks report to a service. They are recognized by name; none of them is imported."""

_WRAPPED = "_phalanx_on_chief"


class ChiefCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Base of Phalanx's callbacks that run only on the chief.

    Attributes:
        saves: Whether it may save the model between any two steps.
    """

    saves = False


class BatchListener(keras.callbacks.Callback):  # type: ignore[misc]
    """Base of Phalanx's callbacks that run on every rank and decide nothing."""


class OnChief(ChiefCallback):
    """Runs a callback on the chief alone.

    Use it for your own callbacks that print, write files or call a service. Keras's callbacks that write files and the
    callbacks of Weights & Biases, MLflow, Comet, Neptune, Aim, DVCLive and SwanLab run on the chief without it.

    Pass a function if the other ranks must not even construct the callback, for example because that starts a run:

        def tracker():
            wandb.init(project="digits")
            return WandbMetricsLogger()

        model.fit(x, y, callbacks=[phalanx.callbacks.OnChief(tracker)])

    Phalanx calls the function once, when the first `fit`, `evaluate` or `predict` with this object begins. If another
    worker of an elastic job becomes chief, it calls the function too; its callback starts without the state of the
    first one.

    What the callback decides holds for all ranks: it may set `model.stop_training` or the learning rate. Inside it,
    `evaluate` and `predict` run on the chief only. It must not train or set weights.

    In a program without a strategy, the callback runs as if it had been passed directly.

    Args:
        callback: A Keras callback, or a function without arguments (or a class) that returns one.

    Raises: ConfigurationError if it is neither, or if the function returns something else.
    """

    def __init__(self, callback: keras.callbacks.Callback | Callable[[], keras.callbacks.Callback]) -> None:
        super().__init__()
        self.callback: Any = None
        self._factory: Callable[[], Any] | None = None
        if isinstance(callback, keras.callbacks.Callback):
            self._wrap(callback)
        elif callable(callback):
            self._factory = callback
        else:
            raise ConfigurationError(
                f"OnChief got {callback!r}; pass a Keras callback, or a function without arguments that returns one."
            )

    def create(self) -> Any:
        """Return the callback. If a function was passed that has not been called yet, call it now."""
        if self.callback is None:
            assert self._factory is not None
            created = self._factory()
            if not isinstance(created, keras.callbacks.Callback):
                raise ConfigurationError(f"The function passed to OnChief returned {created!r}, not a Keras callback.")
            if isinstance(created, ChiefCallback):
                name = type(created).__name__
                raise ConfigurationError(
                    f"The function passed to OnChief returned a {name}, which all ranks must know of. Pass the {name} "
                    f"itself: it runs on the chief alone."
                )
            self._wrap(created)
        return self.callback

    def _wrap(self, callback: Any) -> None:
        self.callback = callback
        vars(callback)[_WRAPPED] = True
        for name in vars(keras.callbacks.Callback):  # for Keras's own `fit`; Phalanx runs the callback itself
            if name.startswith("on_"):
                setattr(self, name, getattr(callback, name))

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.create().set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.create().set_model(model)


def is_wrapped(callback: Any) -> bool:
    """Whether a callback was passed to `OnChief`."""
    return bool(vars(callback).get(_WRAPPED))


def logger_class(callback: Any) -> type | None:
    """Return the class of one of `LOGGER_PACKAGES` that the callback has or derives from, if any."""
    return next((kind for kind in type(callback).__mro__ if kind.__module__.partition(".")[0] in LOGGER_PACKAGES), None)


def create_on_chief(callbacks: Any) -> None:
    """On the chief: create the callbacks for which `OnChief` received a function."""
    for callback in flatten_callbacks(callbacks):
        if isinstance(callback, OnChief):
            callback.create()


def flatten_callbacks(callbacks: Any) -> list[Any]:
    """Return a method's `callbacks` as a list, with each `OnChief` replaced by the callback that it wraps, if any."""
    if callbacks is None:
        return []
    passed = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
    return [each.callback if isinstance(each, OnChief) and each.callback is not None else each for each in passed]
