"""The versions that this task would train with, found without importing Keras or a backend."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import msgspec

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import KERAS_BACKEND
from phalanx.version import __version__

DEFAULT_KERAS_BACKEND = "tensorflow"
"""Keras's default if neither the environment nor its configuration file sets a backend."""

_PACKAGES = {
    "jax": ("jax",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tf-nightly"),
    "torch": ("torch",),
}
"""The packages that may contain a backend."""


class SoftwareVersions(msgspec.Struct, frozen=True, kw_only=True):
    """Versions by name; empty if not installed."""

    python: str
    phalanx: str
    keras: str
    backend: str
    backend_version: str

    def __str__(self) -> str:
        backend = f"{self.backend} {self.backend_version or '(not installed)'}"
        return f"Python {self.python}, Phalanx {self.phalanx}, Keras {self.keras or '(not installed)'}, {backend}"


def installed_software() -> SoftwareVersions:
    """The versions that this interpreter would import."""
    backend = keras_backend(process_environment())
    return SoftwareVersions(
        python=platform.python_version(),
        phalanx=__version__,
        keras=version_of("keras"),
        backend=backend,
        backend_version=next(filter(None, map(version_of, _PACKAGES.get(backend, (backend,)))), ""),
    )


def keras_backend(environment: Mapping[str, str]) -> str:
    """The backend that Keras will choose: KERAS_BACKEND, else its keras.json, else its default."""
    if environment.get(KERAS_BACKEND):
        return environment[KERAS_BACKEND]
    home = Path(environment.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        backend = json.loads((home / "keras.json").read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        backend = None  # Keras too treats a missing or broken file as empty
    return str(backend or DEFAULT_KERAS_BACKEND)


def version_of(package: str) -> str:
    """Its version; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
