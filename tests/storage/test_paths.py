"""Paths that programs give: what they mean, and what is said where a store's package is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.errors import ConfigurationError
from phalanx.storage.paths import local_path, storage_path
from phalanx.storage.remote_path import RemotePath


@pytest.mark.parametrize("path", ["runs/1", "C:/runs", "/tmp/a:b", Path("a//b")])
def test_paths_stay_what_they_are(path: str | Path) -> None:
    assert storage_path(path, "directory") == local_path(path, "directory") == Path(path)


def test_a_url_has_a_name_a_parent_and_files_below_it() -> None:
    run = RemotePath("s3://bucket/runs/1/")
    assert (str(run), run.name, str(run.parent)) == ("s3://bucket/runs/1", "1", "s3://bucket/runs")
    assert str(run / "model.keras") == "s3://bucket/runs/1/model.keras"
    assert str(run.with_name("2")) == "s3://bucket/runs/2"
    assert run == RemotePath("s3://bucket/runs/1")
    assert str(RemotePath("memory://") / "run") == "memory://run"


@pytest.mark.parametrize(
    ("url", "absent", "install"),
    [
        ("s3://bucket/run", "s3fs", r"pip install s3fs\."),
        ("gs://bucket/run", "gcsfs", r"pip install gcsfs\."),
        ("hf://datasets/who/what", "huggingface_hub", r"pip install huggingface_hub\."),
        ("memory://run", "fsspec", r"pip install fsspec\."),
        ("nowhere://run", "", "knows no store nowhere://"),
    ],
)
@pytest.mark.parametrize("make", [phalanx.callbacks.Checkpoint, lambda url: phalanx.Supervisor(logdir=url)])
def test_without_the_package_of_a_store_the_error_says_what_to_install(
    make: Callable[[str], Any], url: str, absent: str, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if absent:
        monkeypatch.setitem(sys.modules, absent, None)  # as if it was not installed
        forget_stores(monkeypatch)
    with pytest.raises(ConfigurationError, match=install):
        make(url)
    assert not list(tmp_path.iterdir()), "no local folder called gs:"


def forget_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes that fsspec has imported before."""
    known: dict[str, Any] = getattr(sys.modules.get("fsspec.registry"), "_registry", {})
    for scheme in ("s3", "gs", "hf"):
        monkeypatch.delitem(known, scheme, raising=False)


@pytest.mark.parametrize("url", ["gs://bucket/run", "memory://run"])
def test_what_needs_a_file_system_refuses_a_url(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Mount the bucket"):
        local_path(url, "snapshot_dir")
