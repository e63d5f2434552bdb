"""The software versions of this task, found without importing Keras or a backend."""

from __future__ import annotations

import importlib.metadata
import platform

import msgspec

from phalanx.config.environment import process_environment
from phalanx.config.keras_backends import keras_backend
from phalanx.version import __version__

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
    """Return the versions that this interpreter would import."""
    backend = keras_backend(process_environment())
    return SoftwareVersions(
        python=platform.python_version(),
        phalanx=__version__,
        keras=version_of("keras"),
        backend=backend,
        backend_version=next(filter(None, map(version_of, _PACKAGES.get(backend, (backend,)))), ""),
    )


def version_of(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
