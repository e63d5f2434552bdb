"""The callbacks that only the chief runs, and what a callback that one rank runs alone may do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import keras
from keras.callbacks import CallbackList

from phalanx.keras_compat.callback_bases import ChiefCallback, flatten_callbacks, is_wrapped, logger_class
from phalanx.keras_compat.patching import overridden_methods
from phalanx.keras_compat.saving.saver_methods import SAVERS
from phalanx.training.program_effects.per_rank_random_numbers import callback_stream

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
    """Whether only the chief runs this callback."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN) and getattr(callback, "raise_error", False):
        return False  # it raises instead of printing, and a program that catches its error continues, on all ranks
    return isinstance(callback, CHIEF_ONLY) or logger_class(callback) is not None or is_wrapped(callback)


def chief_only_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks passed to `fit` that only the chief runs."""
    return [callback for callback in flatten_callbacks(callbacks) if runs_on_chief(callback)]


_thread = threading.local()


def runs_on_this_rank_only() -> bool:
    """Whether this thread is inside a callback that the other ranks are not running."""
    return getattr(_thread, "is_rank_local", False)


def hook_ranks() -> Literal["chief", "all"] | None:
    """Return which ranks run the callback hook that this thread is in; None outside of hooks."""
    return getattr(_thread, "hook_ranks", None)


@contextmanager
def on_this_rank_only() -> Iterator[None]:
    """Make callbacks evaluate and predict only on this rank inside the context."""
    before, _thread.is_rank_local = runs_on_this_rank_only(), True
    try:
        with callback_stream():
            yield
    finally:
        _thread.is_rank_local = before


@contextmanager
def outside_of_hooks() -> Iterator[None]:
    """Treat this thread's code inside the context as outside of hooks, such as in an `evaluate` that a hook calls."""
    with _in_hook(None):
        yield


@contextmanager
def _in_hook(ranks: Literal["chief", "all"] | None) -> Iterator[None]:
    before, _thread.hook_ranks = hook_ranks(), ranks
    try:
        yield
    finally:
        _thread.hook_ranks = before


def announce_hooks(callbacks: CallbackList, exit_stack: ExitStack) -> None:
    """Make `hook_ranks` report when hooks of user callbacks run, until `exit_stack` is closed. Hooks that only the
    chief runs use `on_this_rank_only`: they may evaluate or predict, which the other ranks do not call at that time."""
    for callback in callbacks.callbacks:
        kind = type(callback)
        if kind in CHIEF_ONLY or isinstance(callback, ChiefCallback):
            continue
        run = _run_on_chief if runs_on_chief(callback) else _run_on_all
        hooks = [name for name in vars(keras.callbacks.Callback) if name.startswith("on_")]
        own = {name: getattr(callback, name) for name in hooks if overrides_hook(callback, name)}
        exit_stack.enter_context(
            overridden_methods(callback, **{name: partial(run, hook) for name, hook in own.items()})
        )


def _run_on_chief(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with on_this_rank_only(), _in_hook("chief"):
        return hook(*args, **kwargs)


def _run_on_all(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A process that joins catches up with hooks that the others have already run.
    with _in_hook(None if runs_on_this_rank_only() else "all"):
        return hook(*args, **kwargs)


def overrides_hook(callback: Any, hook: str, base: type = keras.callbacks.Callback) -> bool:
    """Whether a callback's class, or the callback itself, overrides a hook."""
    # LambdaCallback sets its hooks on the instance.
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook)
