"""Callbacks in a job of several ranks: every rank runs them on the same logs; only the chief writes and prints."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
from keras.callbacks import CallbackList, ProgbarLogger

from phalanx.keras_compat.callback_bases import (
    BatchListener,
    ChiefCallback,
    create_on_chief,
    flatten_callbacks,
    is_wrapped,
    logger_class,
)
from phalanx.keras_compat.patching import overridden_methods
from phalanx.keras_compat.saver_methods import SAVERS
from phalanx.training.own_random_numbers import drawing_in_callback

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


_BATCH_HOOKS = {
    "train": ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


class ReplicaProgbar(ProgbarLogger):  # type: ignore[misc]
    """Keras's progress bar, with the number of replicas and the samples per second of all of them.

    Attributes:
        replicas: how many there are now.
        devices: how many one program computes on; None: the replicas have programs of their own.
    """

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.replicas = replicas
        self.devices: int | None = None
        self._samples = 0
        self._start = time.perf_counter()

    def _reset_progbar(self) -> None:
        super()._reset_progbar()
        self._samples = 0
        self._start = time.perf_counter()

    def count(self, samples: int) -> None:
        """Add samples that the replicas have processed together."""
        self._samples += samples
        if self.progbar is not None:
            rate = self._samples / max(time.perf_counter() - self._start, 1e-9)
            count, noun = (self.replicas, "replica") if self.devices is None else (self.devices, "device")
            workers = f"{count} {noun}{'' if count == 1 else 's'}"
            self.progbar.unit_name = f"step - {workers} - {_short(rate)} samples/s"


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def build_callback_list(
    callbacks: Any, model: Any, *, is_chief: bool, replicas: int, verbose: Any, **options: Any
) -> CallbackList:
    """The callbacks that this rank runs, as Keras's `CallbackList`.

    Args:
        callbacks: as they were passed to a method; a `CallbackList` is returned as it is.
        is_chief: whether this rank is the chief.
        replicas: number of replicas that the progress bar shows.
        options: passed to Keras's `CallbackList`.
    """
    if isinstance(callbacks, CallbackList):  # evaluation inside `fit` uses the list of `fit`
        return callbacks
    verbose = 1 if verbose == "auto" else verbose
    if is_chief:
        create_on_chief(callbacks)
    # All ranks run the others on the same logs, so what these decide (stop, learning rate) is the same everywhere, and
    # a member that becomes chief has them as they should be.
    own = [each for each in flatten_callbacks(callbacks) if is_chief or not runs_on_chief(each)]
    if not is_chief:
        for callback in own:
            if getattr(callback, "verbose", 0):
                callback.verbose = 0
    shows = is_chief and verbose != 0
    if shows and not any(isinstance(callback, ProgbarLogger) for callback in own):
        own.append(ReplicaProgbar(replicas))
    return CallbackList(own, add_progbar=shows, verbose=verbose, model=model, **options)


def progress_bar(callbacks: CallbackList, replicas: int | None = None) -> ReplicaProgbar | None:
    """The bar that counts samples, if this rank shows one; if a number of replicas is given, it shows that."""
    bar = getattr(callbacks, "_progbar", None)
    if not isinstance(bar, ReplicaProgbar):
        return None
    bar.replicas = bar.replicas if replicas is None else replicas
    return bar


# Callbacks that one rank runs alone.

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
        own = [name for name in hooks if name not in vars(callback) and _overrides(callback, name)]
        isolated = {name: partial(_run_on_this_rank_only, getattr(callback, name)) for name in own}
        undo.enter_context(overridden_methods(callback, **isolated))


def _run_on_this_rank_only(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with on_this_rank_only():
        return hook(*args, **kwargs)


# What callbacks do, as far as their classes say.


def has_batch_hooks(callbacks: Any, phase: str) -> bool:
    """Whether a user callback has hooks for single batches; then decisions are agreed on after each of them.

    Args:
        callbacks: as the user passed them, which is the same on every rank; not this rank's list.
        phase: "train", "test" or "predict".
    """
    ignored = (ChiefCallback, BatchListener, keras.callbacks.History)
    passed = [callback for callback in _each(callbacks) if not isinstance(callback, ignored)]
    return any(_overrides(callback, hook, _base_of(callback)) for callback in passed for hook in _BATCH_HOOKS[phase])


def chief_may_add_logs(callbacks: Any) -> bool:
    """Whether user callbacks run on the chief alone at the ends of epochs, where they may add to the logs."""
    passed = [c for c in _each(callbacks) if runs_on_chief(c) and not isinstance(c, ChiefCallback)]
    return any(_overrides(callback, "on_epoch_end", _base_of(callback)) for callback in passed)


def runs_batch_hooks(callbacks: CallbackList, phase: str) -> bool:
    """Whether any callback in this rank's list has hooks for single batches."""
    return any(_overrides(callback, hook) for callback in callbacks.callbacks for hook in _BATCH_HOOKS[phase])


def reads_weights_at_epoch_ends(callbacks: CallbackList) -> bool:
    """Whether any callback in this rank's list may read the weights where an epoch ends or begins."""
    return _uses_weights(callbacks, "on_epoch_begin", "on_epoch_end")


def may_set_weights_at_train_end(callbacks: CallbackList) -> bool:
    """Whether any callback in this rank's list may set the weights when the training ends. If so here, then on the
    chief, whose list contains all that this one does."""
    return _uses_weights(callbacks, "on_train_end")


def saves_between_batches(callbacks: Any) -> bool:
    """Whether one of Keras's callbacks among these, a list of either kind, saves the model in the middle of epochs."""
    return any(isinstance(c, SAVERS) and getattr(c, "save_freq", "epoch") != "epoch" for c in _each(callbacks))


def needs_whole_optimizer(callbacks: Any) -> bool:
    """Whether a callback that was passed to `fit` may save the optimizer between any two steps."""
    saves = any(getattr(callback, "saves", False) for callback in flatten_callbacks(callbacks))
    return saves or saves_between_batches(callbacks)


# What these do at the ends of epochs and of the training needs logs, not weights. Unknown callbacks may need weights.
_READS_LOGS_ONLY = (
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    ReplicaProgbar,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TerminateOnNaN,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)


def _uses_weights(callbacks: CallbackList, *hooks: str) -> bool:
    return any(
        any(_overrides(callback, hook) for hook in hooks)
        for callback in callbacks.callbacks
        if not _reads_logs_only(callback)
    )


def _reads_logs_only(callback: Any) -> bool:
    kind = type(callback)
    # Exact classes: a subclass may do anything in the same hooks.
    if kind is keras.callbacks.EarlyStopping:
        return not callback.restore_best_weights
    if kind is keras.callbacks.TensorBoard:
        return not callback.histogram_freq
    return kind in _READS_LOGS_ONLY


def _overrides(callback: Any, hook: str, base: type = keras.callbacks.Callback) -> bool:
    # LambdaCallback sets its hooks on the instance.
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook)


def _base_of(callback: Any) -> type:
    """The class whose hooks the other ranks need not know of: a logger's, one of Keras's for the chief, or none."""
    unnoticed = [kind for kind in CHIEF_ONLY if kind is not keras.callbacks.TerminateOnNaN]  # it stops after a batch
    keras_class = next((kind for kind in type(callback).__mro__ if kind in unnoticed), keras.callbacks.Callback)
    return logger_class(callback) or keras_class


def _each(callbacks: Any) -> list[Any]:
    """The callbacks that were passed to a method, or those of a `CallbackList`."""
    return callbacks.callbacks if isinstance(callbacks, CallbackList) else flatten_callbacks(callbacks)


# Elastic jobs: another rank becomes chief.


def chief_only_callbacks(callbacks: Any) -> list[Any]:
    """Of the callbacks that were passed to `fit`, those that only the chief runs."""
    return [callback for callback in flatten_callbacks(callbacks) if runs_on_chief(callback)]


def transfer_list_state(old: CallbackList, new: CallbackList) -> None:
    """Let a list continue where another one, of the same training, stops."""
    # Keras's count of open `on_*_begin`, and the executor of asynchronous hooks, which it shuts down when the count is
    # 0: a list that began at 0 would raise at its first `on_*_end`.
    for name in ("_in_begin_end_block_count", "_executor"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def start_mid_epoch(callbacks: Sequence[Any], epoch: int, restore: Callable[[], None]) -> None:
    """Begin, in the middle of an epoch, callbacks that a former chief has run until now.

    Args:
        restore: gives them what they have learnt until the epoch, which `on_train_begin` resets.
    """
    # A backup would be restored, which is older than the state of this process.
    begun = [each for each in callbacks if not isinstance(each, keras.callbacks.BackupAndRestore)]
    for callback in begun:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True
        callback.on_train_begin()
    restore()
    for callback in begun:
        callback.on_epoch_begin(epoch)
