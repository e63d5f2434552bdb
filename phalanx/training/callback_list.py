"""The callbacks of one rank as Keras's `CallbackList`: all use the same logs; only the chief writes and prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.callbacks import CallbackList, ProgbarLogger

from phalanx.keras_compat.callback_bases import create_on_chief, flatten_callbacks
from phalanx.training.chief_callbacks import runs_on_chief
from phalanx.training.progress_bar import ReplicaProgbar


def build_callback_list(
    callbacks: Any, model: Any, *, is_chief: bool, replicas: int, verbose: Any, **options: Any
) -> CallbackList:
    """Return the callbacks that this rank runs, as Keras's `CallbackList`.

    Args:
        callbacks: The callbacks passed to a method; a `CallbackList` is returned unchanged.
        is_chief: Whether this rank is the chief.
        replicas: Number of replicas that the progress bar shows.
        options: Options for Keras's `CallbackList`.
    """
    if isinstance(callbacks, CallbackList):  # evaluation inside `fit` uses the list of `fit`
        return callbacks
    verbose = 1 if verbose == "auto" else verbose
    if is_chief:
        create_on_chief(callbacks)
    # All ranks run the others on the same logs, so their decisions (stop, learning rate) are the same everywhere, and a
    # member that becomes chief already has up-to-date callbacks.
    own = [each for each in flatten_callbacks(callbacks) if is_chief or not runs_on_chief(each)]
    if not is_chief:
        for callback in own:
            if getattr(callback, "verbose", 0):
                callback.verbose = 0
    shows = is_chief and verbose != 0
    if shows and not any(isinstance(callback, ProgbarLogger) for callback in own):
        own.append(ReplicaProgbar(replicas))
    return CallbackList(own, add_progbar=shows, verbose=verbose, model=model, **options)


def transfer_list_state(old: CallbackList, new: CallbackList) -> None:
    """Make a list continue where another one, of the same training, stops."""
    # Keras's count of open `on_*_begin`, and the executor of asynchronous hooks, which it shuts down when the count is
    # 0: a list that started at 0 would raise at its first `on_*_end`.
    for name in ("_in_begin_end_block_count", "_executor"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def start_mid_epoch(callbacks: Sequence[Any], epoch: int, restore: Callable[[], None]) -> None:
    """Start callbacks, in the middle of an epoch, that an earlier chief has run so far.

    Args:
        restore: Restores their state at the epoch's start, which `on_train_begin` resets.
    """
    # A backup would be restored, although it is older than the state of this process.
    begun = [each for each in callbacks if not isinstance(each, keras.callbacks.BackupAndRestore)]
    for callback in begun:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True
        callback.on_train_begin()
    restore()
    for callback in begun:
        callback.on_epoch_begin(epoch)
