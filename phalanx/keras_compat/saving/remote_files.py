"""Makes Keras's saving and loading (`model.save`, `ModelCheckpoint`, `BackupAndRestore`, `CSVLogger`) accept URLs.

Keras passes every path that may be a URL to the functions of one module, `keras.src.utils.file_utils`. These call
TensorFlow's `gfile`, if TensorFlow is installed, for the few stores that it was built with. `install` makes them use
the store of `fsspec` if its package is installed, on every backend. Keras handles all other paths.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import functools
import os
import posixpath
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras.src.utils import file_utils

from phalanx.keras_compat.patching import Patches
from phalanx.storage.files import copy_file, list_names
from phalanx.storage.paths import is_url
from phalanx.storage.remote_path import RemotePath, has_store


def install(patches: Patches) -> None:
    """Replace Keras's functions."""
    for name, function in _FUNCTIONS.items():
        patches.replace(file_utils, name, functools.partial(_prefer_store, function=function))


def exists(path: str) -> bool:
    """Whether a file that Keras writes exists."""
    return bool(file_utils.exists(path))


def read_text(path: str) -> str:
    """Read a file that Keras has written."""
    with file_utils.File(path, "r") as file:
        return str(file.read())


def _prefer_store(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def either(path: Any, *args: Any, **kwargs: Any) -> Any:
        # Both paths of `copy` may be URLs. What `join` appends never is.
        paths = [path, *args] if function is _copy else [path]
        urls = [os.fspath(each) for each in paths if isinstance(each, str | os.PathLike) and is_url(each)]
        if not urls or not all(map(has_store, urls)):
            return original(path, *args, **kwargs)
        return function(os.fspath(path), *args, **kwargs)

    return either


def _copy(src: str, dst: str) -> None:
    if not is_url(dst):
        RemotePath(src).download(Path(dst))
    elif not is_url(src):
        copy_file(Path(src), RemotePath(dst))
    else:
        with RemotePath(src).open("rb") as source:
            RemotePath(dst).write(lambda file: shutil.copyfileobj(source, file, 1 << 20))


def _remove_tree(path: str) -> None:
    for name in list_names(RemotePath(path)):
        (RemotePath(path) / name).unlink(missing_ok=True)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exists": lambda path: RemotePath(path).exists(),
    "File": lambda path, mode="r": RemotePath(path).open(mode),
    "join": posixpath.join,
    "isdir": lambda path: RemotePath(path).is_dir(),
    "remove": lambda path: RemotePath(path).unlink(),
    "rmtree": _remove_tree,
    "listdir": lambda path: list_names(RemotePath(path)),
    "copy": _copy,
    "makedirs": lambda path: RemotePath(path).mkdir(),
}
