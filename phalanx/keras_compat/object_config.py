"""What Keras tells of its own things: optimizers, constraints, losses; from that another process makes its own."""

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

_describing = threading.RLock()


def config_json_of(thing: Any) -> str:
    """Keras's description of an optimizer or a constraint, as JSON, from which any backend makes its own."""
    with _without_tensorflow():
        described = keras.saving.serialize_keras_object(thing)
    if described.get("module", "").startswith("keras.src.backend."):  # that of this process
        described |= {"module": "keras.optimizers", "registered_name": None}
    return json.dumps(described)


def configuration_of(thing: Any) -> dict[str, Any]:
    """`thing.get_config()`: the arguments that an object of Keras was made with."""
    with _without_tensorflow():
        return thing.get_config()  # type: ignore[no-any-return]


def clone_from_config(thing: Any) -> Any:
    """Another object made from what `thing` tells of itself."""
    with _without_tensorflow():
        return type(thing).from_config(thing.get_config())


@contextmanager
def _without_tensorflow() -> Iterator[None]:
    """Keras asks of all that it describes, a schedule of learning rates as well, whether TensorFlow has made it, and
    imports TensorFlow for that, which takes seconds of a job's start. What was not imported has made nothing."""
    with _describing:
        tensorflow = serialization_lib.tf
        if "tensorflow" not in sys.modules:
            serialization_lib.tf = SimpleNamespace(available=False)
        try:
            yield
        finally:
            serialization_lib.tf = tensorflow
