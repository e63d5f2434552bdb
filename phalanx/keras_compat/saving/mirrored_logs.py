"""Makes Keras's `TensorBoard` write to a store: TensorFlow's event writers support few, and none through `fsspec`.

The callback writes to a temporary folder, which is uploaded after each epoch and each evaluation. If the store's
package is not installed, the URL is left to TensorFlow.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import keras

from phalanx.keras_compat.patching import Patches
from phalanx.storage.mirror import MirroredDirectory
from phalanx.storage.paths import is_url
from phalanx.storage.remote_path import RemotePath, has_store

_folders: WeakKeyDictionary[Any, MirroredDirectory] = WeakKeyDictionary()


def install(patches: Patches) -> None:
    """Patch the callback's class."""
    patches.replace(keras.callbacks.TensorBoard, "set_model", _redirecting)
    for name in ("on_epoch_end", "on_test_end", "on_train_end"):
        patches.replace(keras.callbacks.TensorBoard, name, _uploading)


def _redirecting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_model(self: Any, model: Any) -> None:
        url = self.log_dir
        if not is_url(url) or not has_store(url):
            original(self, model)
            return
        if (former := _folders.get(self)) is not None:
            former.close()  # of a standalone evaluation, which has uploaded it, and which has no end like training
        folder = _folders[self] = MirroredDirectory(RemotePath(url))
        weakref.finalize(self, folder.close)  # also when the process exits
        # Only while Keras creates its writers. Afterwards, the program sees the URL that it passed.
        self.log_dir = str(folder.path)
        try:
            original(self, model)
        finally:
            self.log_dir = url

    return set_model


def _uploading(original: Callable[..., Any]) -> Callable[..., Any]:
    is_last = original.__name__ == "on_train_end"

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        folder = _folders.get(self)
        if folder is None:
            return
        if not is_last:
            # TensorFlow's buffers are not in the folder yet. At the end, Keras closes the writers before this.
            for writer in self._writers.values():
                writer.flush()
        folder.upload()
        if is_last:
            folder.close()
            del _folders[self]

    return method
