"""Hooks of callbacks, and what they may read or change, as far as their classes reveal it."""

from __future__ import annotations

from typing import Any

import keras
from keras.callbacks import CallbackList

from phalanx.keras_compat.callback_bases import BatchListener, ChiefCallback, flatten_callbacks, logger_class
from phalanx.keras_compat.saving.saver_methods import SAVERS
from phalanx.training.chief_callbacks import CHIEF_ONLY, overrides_hook, runs_on_chief
from phalanx.training.progress_bar import ReplicaProgbar

_BATCH_HOOKS = {
    "train": ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


def has_batch_hooks(callbacks: Any, phase: str) -> bool:
    """Whether a user callback has hooks for single batches, after each of which the ranks must agree.

    Args:
        callbacks: The callbacks that the user passed, the same on every rank; not this rank's list.
        phase: The phase, "train", "test" or "predict".
    """
    return bool(_of_batches(callbacks, phase))


def chief_may_add_logs(callbacks: Any) -> bool:
    """Whether user callbacks run only on the chief at epoch ends, where they may add to the logs."""
    passed = [c for c in _each(callbacks) if runs_on_chief(c) and not isinstance(c, ChiefCallback)]
    return any(overrides_hook(callback, "on_epoch_end", _base_of(callback)) for callback in passed)


def runs_batch_hooks(callbacks: CallbackList, phase: str) -> bool:
    """Whether any callback in this rank's list has hooks for single batches."""
    return any(overrides_hook(callback, hook) for callback in callbacks.callbacks for hook in _BATCH_HOOKS[phase])


def reads_weights_at_epoch_ends(callbacks: CallbackList) -> bool:
    """Whether any callback in this rank's list may read the weights when an epoch begins or ends."""
    return _uses_weights(callbacks, "on_epoch_begin", "on_epoch_end")


def may_set_weights_at_train_end(callbacks: CallbackList) -> bool:
    """Whether any callback in this rank's list may set the weights when training ends. If so here, then also on the
    chief, whose list contains this one."""
    return _uses_weights(callbacks, "on_train_end")


def saves_between_batches(callbacks: Any) -> bool:
    """Whether one of Keras's callbacks in a list of either kind saves the model in the middle of epochs."""
    return any(isinstance(c, SAVERS) and getattr(c, "save_freq", "epoch") != "epoch" for c in _each(callbacks))


def needs_whole_optimizer(callbacks: Any) -> bool:
    """Whether a callback that was passed to `fit` saves the optimizer between any two steps."""
    saves = any(getattr(callback, "saves", False) for callback in flatten_callbacks(callbacks))
    return saves or saves_between_batches(callbacks)


def may_read_optimizer(callbacks: Any) -> bool:
    """Whether a callback that was passed to `fit` may save or read the optimizer between any two steps."""
    return any(not _reads_logs_only(callback) for callback in _of_batches(callbacks, "train"))


# At the ends of epochs and of training, these need logs, not weights. Unknown callbacks may need weights.
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
        any(overrides_hook(callback, hook) for hook in hooks)
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


def _of_batches(callbacks: Any, phase: str) -> list[Any]:
    """Return the user callbacks that have hooks for single batches."""
    ignored = (ChiefCallback, BatchListener, keras.callbacks.History)
    return [
        callback
        for callback in _each(callbacks)
        if not isinstance(callback, ignored)
        and any(overrides_hook(callback, hook, _base_of(callback)) for hook in _BATCH_HOOKS[phase])
    ]


def _base_of(callback: Any) -> type:
    """Return the class whose hooks need no agreement: a logger's, one of Keras's for the chief, or the base."""
    unnoticed = [kind for kind in CHIEF_ONLY if kind is not keras.callbacks.TerminateOnNaN]  # it stops after a batch
    keras_class = next((kind for kind in type(callback).__mro__ if kind in unnoticed), keras.callbacks.Callback)
    return logger_class(callback) or keras_class


def _each(callbacks: Any) -> list[Any]:
    """Return the callbacks that were passed to a method, or those of a `CallbackList`."""
    return callbacks.callbacks if isinstance(callbacks, CallbackList) else flatten_callbacks(callbacks)
