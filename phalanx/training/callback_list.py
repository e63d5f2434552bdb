"""Callbacks in a job of several ranks: every rank runs them on the same logs, only the chief writes and prints."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.callbacks import CallbackList
from keras.src.callbacks.progbar_logger import ProgbarLogger

from phalanx.transport.serialization import decode, encode, is_serializable


class ChiefCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Base of callbacks of our own that run on the chief alone.

    Attributes:
        saves: whether it may save the model between any two steps.
    """

    saves = False


class BatchListener(keras.callbacks.Callback):  # type: ignore[misc]
    """Base of callbacks of our own that run on every rank and decide nothing."""


_ORBAX = [keras.callbacks.OrbaxCheckpoint] if hasattr(keras.callbacks, "OrbaxCheckpoint") else []  # not in Keras 3.12
_SAVERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore, *_ORBAX)

# What these do is for all: files, services, the terminal. The chief does it once.
CHIEF_ONLY = (
    *_SAVERS,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.TerminateOnNaN,  # it says so, and the others stop with the chief: the loss is the same
    ChiefCallback,
)

_BATCH_HOOKS = {
    "train": ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


class ReplicaProgbar(ProgbarLogger):  # type: ignore[misc]
    """Keras's progress bar, with the number of replicas and the samples per second of all of them."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self._replicas = replicas
        self._samples = 0
        self._start = time.perf_counter()

    def _reset_progbar(self) -> None:
        super()._reset_progbar()
        self._samples = 0
        self._start = time.perf_counter()

    def count(self, samples: int, replicas: int | None = None) -> None:
        """Note that the replicas have together finished so many more samples.

        Args:
            replicas: how many they are now; None: as before.
        """
        self._samples += samples
        self._replicas = replicas or self._replicas
        if self.progbar is not None:
            rate = self._samples / max(time.perf_counter() - self._start, 1e-9)
            workers = "1 replica" if self._replicas == 1 else f"{self._replicas} replicas"
            self.progbar.unit_name = f"step - {workers} - {_short(rate)} samples/s"


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def make_list(
    callbacks: Any,
    *,
    model: Any,
    chief: bool,
    replicas: int,
    verbose: Any,
    epochs: int,
    steps: int | None,
    history: bool,
    more: Sequence[Any] = (),
) -> CallbackList:
    """The callbacks that this rank runs, as Keras's `CallbackList`; `more` are our own."""
    if isinstance(callbacks, CallbackList):  # evaluation inside `fit`: the list is made already
        return callbacks
    verbose = 1 if verbose == "auto" else verbose
    own = [callback for callback in [*flat(callbacks), *more] if chief or not isinstance(callback, CHIEF_ONLY)]
    if not chief:
        for callback in own:
            if getattr(callback, "verbose", 0):
                callback.verbose = 0
    shows = chief and verbose != 0
    if shows and not any(isinstance(callback, ProgbarLogger) for callback in own):
        own.append(ReplicaProgbar(replicas))
    return CallbackList(
        own, add_history=history, add_progbar=shows, verbose=verbose, epochs=epochs, steps=steps, model=model
    )


_running = threading.local()


def runs_alone() -> bool:
    """Whether this thread is inside a callback that the other ranks do not run now."""
    return getattr(_running, "alone", False)


@contextmanager
def alone() -> Iterator[None]:
    """While inside, what callbacks evaluate or predict is this rank's own matter."""
    before, _running.alone = runs_alone(), True
    try:
        yield
    finally:
        _running.alone = before


def mark(callbacks: CallbackList) -> None:
    """Let `runs_alone` know of the hooks of callbacks that are the program's own, derived from ones of the chief's:
    they may evaluate or predict, where the other ranks do not come to it."""
    for callback in callbacks.callbacks:
        kind = type(callback)
        if not isinstance(callback, CHIEF_ONLY) or kind in CHIEF_ONLY or issubclass(kind, ChiefCallback):
            continue
        for name in vars(keras.callbacks.Callback):
            if name.startswith("on_") and name not in vars(callback) and _overrides(callback, name):
                vars(callback)[name] = _Alone(getattr(callback, name))


def unmark(callbacks: CallbackList) -> None:
    """The callbacks are again as they were passed."""
    for callback in callbacks.callbacks:
        for name in [name for name, value in vars(callback).items() if isinstance(value, _Alone)]:
            del vars(callback)[name]


class _Alone:
    """A hook inside of which `runs_alone` is true."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with alone():
            return self._hook(*args, **kwargs)


def flat(callbacks: Any) -> list[Any]:
    """The callbacks that were passed to a method, as a list."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]


def _each(callbacks: Any) -> list[Any]:
    """The callbacks that were passed to a method, or those of a list that is made already."""
    return callbacks.callbacks if isinstance(callbacks, CallbackList) else flat(callbacks)


def progress_bar(callbacks: CallbackList) -> ReplicaProgbar | None:
    """The bar that counts samples, if this rank shows one."""
    bar = getattr(callbacks, "_progbar", None)
    return bar if isinstance(bar, ReplicaProgbar) else None


def watches_batches(callbacks: Any, phase: str) -> bool:
    """Whether a callback of the user's sees single batches; then decisions are agreed on after each of them.

    Takes what the user passed, which is the same on every rank, not this rank's list.
    """
    own = [c for c in _each(callbacks) if not isinstance(c, (ChiefCallback, BatchListener, keras.callbacks.History))]
    return any(_overrides(callback, hook, _origin(callback)) for callback in own for hook in _BATCH_HOOKS[phase])


def _origin(callback: Any) -> type:
    """Where what a callback does comes from that the other ranks need not know of: a class of Keras's for the chief
    alone, or none."""
    return next((kind for kind in type(callback).__mro__ if kind in CHIEF_ONLY), keras.callbacks.Callback)


def change_logs_on_the_chief(callbacks: Any) -> bool:
    """Whether callbacks of the user's run on the chief alone at the ends of epochs, where they may add to the logs."""
    own = [c for c in _each(callbacks) if isinstance(c, CHIEF_ONLY) and not isinstance(c, ChiefCallback)]
    return any(_overrides(callback, "on_epoch_end", _origin(callback)) for callback in own)


def listens_to_batches(callbacks: CallbackList, phase: str, *, but: Sequence[type] = ()) -> bool:
    """Whether anything in this rank's list, `but` callbacks of these kinds, has something to do at single batches."""
    own = [callback for callback in callbacks.callbacks if type(callback) not in but]
    return any(_overrides(callback, hook) for callback in own for hook in _BATCH_HOOKS[phase])


def looks_between_batches(callbacks: CallbackList) -> bool:
    """Whether anything in this rank's list may look at the model between two steps of the training: all that has
    something to do there, but bars, which show logs."""
    return listens_to_batches(callbacks, "train", but=(keras.callbacks.ProgbarLogger, ReplicaProgbar))


def _overrides(callback: Any, hook: str, origin: type = keras.callbacks.Callback) -> bool:
    # LambdaCallback sets its hooks on the instance.
    default = getattr(origin, hook)
    return getattr(getattr(callback, hook), "__func__", None) is not default


# What these do at the ends of epochs and of the training needs logs, not weights.
_BLIND = (
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    ReplicaProgbar,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TerminateOnNaN,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)


def looks_at_weights(callbacks: CallbackList) -> bool:
    """Whether anything in this rank's list may read the model's weights where an epoch ends or begins: all that is not
    known to do without."""
    return _needs_weights(callbacks, "on_epoch_begin", "on_epoch_end")


def may_set_weights_at_the_end(callbacks: CallbackList) -> bool:
    """Whether anything in this rank's list may set the model's weights when the training ends. If so here, then on the
    chief, whose list has whatever this one has."""
    return _needs_weights(callbacks, "on_train_end")


def _needs_weights(callbacks: CallbackList, *hooks: str) -> bool:
    """Whether a callback that is not known to do without has one of these hooks."""
    return any(
        any(_overrides(callback, hook) for hook in hooks)
        for callback in callbacks.callbacks
        if type(callback) not in _BLIND and not _only_counts(callback)
    )


def saves_between_batches(callbacks: Any) -> bool:
    """Whether a callback of Keras's among these, a list of either kind, saves the model in the middle of epochs."""
    return any(isinstance(c, _SAVERS) and getattr(c, "save_freq", "epoch") != "epoch" for c in _each(callbacks))


def needs_whole_optimizer(callbacks: Any) -> bool:
    """Whether something that is passed to `fit` may save the optimizer between any two steps."""
    return saves_between_batches(callbacks) or any(getattr(callback, "saves", False) for callback in flat(callbacks))


def _only_counts(callback: Any) -> bool:
    if type(callback) is keras.callbacks.EarlyStopping:
        return not callback.restore_best_weights
    return type(callback) is keras.callbacks.TensorBoard and not callback.histogram_freq


# Jobs whose members come and go.


def only_for_chiefs(callbacks: Any) -> list[Any]:
    """Of the callbacks that were passed to `fit`, those that only the chief runs."""
    return [callback for callback in flat(callbacks) if isinstance(callback, CHIEF_ONLY)]


def succeed(new: CallbackList, old: CallbackList) -> None:
    """Let a list go on where another one, of the same training, stops."""
    for name in ("_in_begin_end_block_count", "_executor"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def take_over(callbacks: Sequence[Any], epoch: int) -> None:
    """Begin, in the middle of an epoch, callbacks that a former chief has run until now."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            continue  # it would restore a backup, which is older than what this process has
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True
        callback.on_train_begin()
        callback.on_epoch_begin(epoch)


_NOT_REMEMBERED = ("params", "_params", "model", "_model", "progbar", "verbose")


def remembered(callback: Any) -> bytes:
    """What a callback knows from the training so far: its attributes that are plain values or arrays."""
    known = {
        name: value for name, value in vars(callback).items() if name not in _NOT_REMEMBERED and is_serializable(value)
    }
    return encode(known)


def remember(callback: Any, memory: bytes) -> None:
    """Give a callback what another one of its kind has `remembered`."""
    vars(callback).update(decode(memory))
    if hasattr(callback, "min_delta") and getattr(callback, "monitor_op", True) is None:
        # At the end of its first epoch it learns which way is better, and then turns the sign of `min_delta`.
        callback.min_delta = abs(callback.min_delta)
