"""Keras runs on a backend that is installed."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from phalanx.config import keras_backends
from phalanx.runtime.installed_backend import replace_missing_backend


@pytest.fixture
def without_tensorflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keras's folder, on a machine where JAX and PyTorch are installed; neither is imported."""
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    cluster = {"worker": ["a:1", "b:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    monkeypatch.setattr(keras_backends, "find_spec", lambda name: None if name == "tensorflow" else object())
    for name in ("jax", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_it_replaces_the_default_and_says_so(without_tensorflow: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    replace_missing_backend()
    assert os.environ["KERAS_BACKEND"] == "jax"
    replace_missing_backend()
    assert caplog.messages == ["tensorflow is not installed, so Keras runs on jax. To choose, set KERAS_BACKEND."]


def test_one_that_the_program_has_imported_comes_first(
    without_tensorflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    replace_missing_backend()
    assert os.environ["KERAS_BACKEND"] == "torch"


@pytest.mark.parametrize("chosen", ["torch", "tensorflow"])
def test_what_the_program_has_set_stays(chosen: str, without_tensorflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", chosen)
    replace_missing_backend()
    assert os.environ["KERAS_BACKEND"] == chosen


@pytest.mark.parametrize("chosen", ["torch", "openvino"])
def test_so_does_what_keras_finds_in_its_file(chosen: str, without_tensorflow: Path) -> None:
    (without_tensorflow / "keras.json").write_text(json.dumps({"backend": chosen}))
    replace_missing_backend()
    assert "KERAS_BACKEND" not in os.environ
