"""Where programs give a URL for a path, which would become a local folder called `gs:`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.config.local_paths import local_path
from phalanx.errors import ConfigurationError


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run", "memory://run", "hf://who/what"])
@pytest.mark.parametrize("make", [phalanx.callbacks.Checkpoint, lambda url: phalanx.Supervisor(logdir=url)])
def test_a_url_is_refused_before_anything_is_written(
    make: Callable[[str], Any], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"Mount the bucket"):
        make(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["runs/1", "C:/runs", "/tmp/a:b", Path("a//b")])
def test_paths_stay_what_they_are(path: str | Path) -> None:
    assert local_path(path, "directory") == Path(path)
