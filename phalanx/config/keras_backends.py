"""The backends of Keras that Phalanx trains on."""

from importlib.util import find_spec

BACKENDS = ("jax", "tensorflow", "torch")


def installed_backends() -> list[str]:
    """Those that this interpreter could import. None of them is imported."""
    return [backend for backend in BACKENDS if find_spec(backend) is not None]
