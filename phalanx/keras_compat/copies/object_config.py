"""Configs of Keras objects (optimizers, constraints, losses), from which another process builds the same objects.

Patches `keras.src.saving.serialization_lib.tf` during a call. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import keras
from keras.src.saving import serialization_lib

_serialization_lock = threading.RLock()
"""Held while Keras's module is patched, so that no thread restores what another still needs."""


def config_json_of(thing: Any) -> str:
    """Return Keras's config of an optimizer or a constraint as JSON, from which any backend builds the same."""
    with without_tensorflow():
        described = keras.saving.serialize_keras_object(thing)
    module = described["module"] or ""  # None for custom classes
    if module.startswith("keras.src.backend."):  # the backend of this process
        # The servers may run another backend, which has a class of the same name.
        described |= {"module": "keras.optimizers", "registered_name": None}
    return json.dumps(described)


def serialize_object(thing: Any) -> dict[str, Any]:
    """Return the result of `keras.saving.serialize_keras_object`."""
    with without_tensorflow():
        return keras.saving.serialize_keras_object(thing)  # type: ignore[no-any-return]


def config_of(thing: Any) -> dict[str, Any]:
    """Return `thing.get_config()`, the arguments of a Keras object."""
    with without_tensorflow():
        return thing.get_config()  # type: ignore[no-any-return]


def clone_from_config(thing: Any) -> Any:
    """Build another object from the config of `thing`."""
    with without_tensorflow():
        return type(thing).from_config(thing.get_config())


@contextmanager
def without_tensorflow() -> Iterator[None]:
    """Context in which Keras does not import TensorFlow to serialize an object.

    Keras tests whether an object belongs to TensorFlow, and imports TensorFlow for that, which takes seconds of a job's
    start. If TensorFlow is not imported, no object does.
    """
    with _serialization_lock:
        tensorflow = serialization_lib.tf
        if "tensorflow" not in sys.modules:
            serialization_lib.tf = SimpleNamespace(available=False)
        try:
            yield
        finally:
            serialization_lib.tf = tensorflow
