"""The callbacks that the chief alone runs, and what a callback that one rank runs alone may do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
from keras.callbacks import CallbackList

from phalanx.keras_compat.callback_bases import ChiefCallback, flatten_callbacks, is_wrapped, logger_class
from phalanx.keras_compat.patching import overridden_methods
from phalanx.keras_compat.saver_methods import SAVERS
from phalanx.training.program_effects.per_rank_random_numbers import drawing_in_callback

# These write files, call services or print: the chief does it once for all.
CHIEF_ONLY = (
    *SAVERS,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.TerminateOnNaN,  # it prints; the other ranks have the same loss, and stop with the chief
    ChiefCallback,
)


def runs_on_chief(callback: Any) -> bool:
    """Whether the chief alone runs this callback."""
    return isinstance(callback, CHIEF_ONLY) or logger_class(callback) is not None or is_wrapped(callback)


def chief_only_callbacks(callbacks: Any) -> list[Any]:
    """Of the callbacks that were passed to `fit`, those that only the chief runs."""
    return [callback for callback in flatten_callbacks(callbacks) if runs_on_chief(callback)]


_thread = threading.local()


def runs_on_this_rank_only() -> bool:
    """Whether this thread is inside a callback that the other ranks are not running now."""
    return getattr(_thread, "is_rank_local", False)


@contextmanager
def on_this_rank_only() -> Iterator[None]:
    """While inside, callbacks evaluate and predict on this rank only."""
    before, _thread.is_rank_local = runs_on_this_rank_only(), True
    try:
        with drawing_in_callback():
            yield
    finally:
        _thread.is_rank_local = before


def isolate_chief_hooks(callbacks: CallbackList, undo: ExitStack) -> None:
    """Run the hooks of user callbacks that run on the chief alone inside `on_this_rank_only`: they may evaluate or
    predict, and the other ranks do not call these methods then. As before once `undo` is closed."""
    for callback in callbacks.callbacks:
        kind = type(callback)
        if not runs_on_chief(callback) or kind in CHIEF_ONLY or issubclass(kind, ChiefCallback):
            continue
        hooks = [name for name in vars(keras.callbacks.Callback) if name.startswith("on_")]
        own = [name for name in hooks if name not in vars(callback) and overrides_hook(callback, name)]
        isolated = {name: partial(_run_on_this_rank_only, getattr(callback, name)) for name in own}
        undo.enter_context(overridden_methods(callback, **isolated))


def _run_on_this_rank_only(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with on_this_rank_only():
        return hook(*args, **kwargs)


def overrides_hook(callback: Any, hook: str, base: type = keras.callbacks.Callback) -> bool:
    """Whether a callback's class, or the callback itself, has a hook of its own."""
    # LambdaCallback sets its hooks on the instance.
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook)
