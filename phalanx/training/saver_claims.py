"""Claims for Keras's callbacks that save: they write only as long as their process may (`runtime.write_claim`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import keras
from keras.callbacks import CallbackList

from phalanx.engines.spmd.placement import Placement
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.callback_bases import flatten_callbacks
from phalanx.keras_compat.patching import overridden_methods
from phalanx.keras_compat.saving.saver_methods import (
    SAVERS,
    finish_writing,
    writing_atomically,
    writing_methods,
    written_path,
)
from phalanx.runtime.write_claim import WriteClaim
from phalanx.storage.paths import StoragePath


def refuse_divided(callbacks: Any, placement: Placement) -> None:
    """Raise UnsupportedError for Keras's callbacks that save, if a program spans several processes: the chief alone
    cannot save or restore the model."""
    for callback in flatten_callbacks(callbacks):
        restores = isinstance(callback, keras.callbacks.BackupAndRestore)
        if isinstance(callback, SAVERS) and (restores or placement.divides_models):
            name = type(callback).__name__
            raise UnsupportedError(
                f"The chief runs {name} alone, and here one program spans several processes, which hold the model "
                f"together. Write phalanx.callbacks.Checkpoint(directory) instead: every process saves its part, and "
                f"`fit` resumes by itself. phalanx.ShardedCheckpoint saves at moments that you choose."
            )


def claim_paths(callbacks: CallbackList, exit_stack: ExitStack, generation: Callable[[], int] = lambda: 0) -> None:
    """Claim the paths to which the callbacks in this rank's list save, and make them write under these claims.

    Args:
        callbacks: The callbacks that this rank runs.
        exit_stack: Releases the claims when it is closed.
        generation: See `WriteClaim`.

    Raises: ConfigurationError, SupersededError as `WriteClaim.acquire`.
    """
    for callback in callbacks.callbacks:
        path = written_path(callback) if isinstance(callback, SAVERS) else None
        if path is None:
            continue
        claim = _claim(path, generation)
        with contextlib.suppress(OSError):  # the callback will fail in the same way
            claim.acquire()
        exit_stack.callback(claim.release)
        methods = {
            name: partial(_write, claim, callback, getattr(callback, name)) for name in writing_methods(callback)
        }
        exit_stack.enter_context(overridden_methods(callback, **methods))


def _write(claim: WriteClaim, callback: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with claim.writing(), writing_atomically(callback):
        result = method(*args, **kwargs)
        finish_writing(callback)
    return result


def _claim(path: StoragePath, generation: Callable[[], int]) -> WriteClaim:
    while "{" in str(path.parent):  # a pattern: the resulting directories are not known
        path = path.parent
    return WriteClaim(path.parent, path.name, generation)
