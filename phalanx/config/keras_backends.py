"""The backends of Keras that Phalanx trains on."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from phalanx.config.environment_variables import KERAS_BACKEND

BACKENDS = ("jax", "tensorflow", "torch")
DEFAULT_KERAS_BACKEND = "tensorflow"
"""Keras's default if neither the environment nor its configuration file sets a backend."""


def installed_backends() -> list[str]:
    """Return the backends that this interpreter could import, without importing them."""
    return [backend for backend in BACKENDS if find_spec(backend) is not None]


def keras_backend(environment: Mapping[str, str]) -> str:
    """Return the backend that Keras will choose: KERAS_BACKEND, else its keras.json, else its default."""
    if environment.get(KERAS_BACKEND):
        return environment[KERAS_BACKEND]
    home = Path(environment.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        backend = json.loads((home / "keras.json").read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        backend = None  # Keras too treats a missing or broken file as empty
    return str(backend or DEFAULT_KERAS_BACKEND)
