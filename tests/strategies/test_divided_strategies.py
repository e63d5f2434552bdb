"""Strategies of one compiled program say where they cannot be: on other backends, with other arguments."""

from __future__ import annotations

from collections.abc import Callable

import keras
import pytest

import phalanx
from phalanx.errors import ConfigurationError, UnsupportedError


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (phalanx.ShardedStrategy, "ShardedStrategy"),
        (phalanx.ModelParallelStrategy, "ModelParallelStrategy"),
        (lambda: phalanx.MirroredStrategy(engine="spmd"), "MirroredStrategy"),
    ],
)
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_other_backends_are_refused_with_the_remedy(
    backend: str, make: Callable[[], phalanx.Strategy], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    with pytest.raises(UnsupportedError, match=f"{name}.*only on JAX.*{backend!r}.*KERAS_BACKEND=jax"):
        make()


def test_arguments_of_replicas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ConfigurationError, match="cross_device_ops and compression say how replicas merge"):
        phalanx.MirroredStrategy(engine="spmd", compression="int8")
    with pytest.raises(ConfigurationError, match="it is 'spmd' or 'replicas'"):
        phalanx.MirroredStrategy(engine="xla")
