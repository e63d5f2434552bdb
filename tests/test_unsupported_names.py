"""Names of `tf.distribute` that are not there."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("phalanx.tpu.experimental", "DeviceAssignment", ": ModelParallelStrategy"),
        ("phalanx", "Stratgy", ""),
        ("phalanx.cluster_resolver", "GCEResolver", ""),
        ("phalanx.experimental", "rpc", ": schedule functions"),
        ("phalanx.experimental", "no_such_thing", ""),
    ],
)
def test_the_error_says_what_to_do_without(module: str, name: str, instead: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(importlib.import_module(module), name)
    assert str(error.value).startswith(f"module {module!r} has no attribute {name!r}{instead}")
    assert instead or str(error.value).endswith("'")
