"""Folders in a file system and in stores: those of `fsspec` itself, and those of a server that speaks S3."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.storage.paths import StoragePath
from phalanx.storage.remote_path import RemotePath

BUCKET = "phalanx-tests"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a server of Moto in this process. `make test-cloud` installs it."""
    pytest.importorskip("s3fs")
    server: Any = pytest.importorskip("moto.server")
    threaded = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    threaded.start()
    host, port = threaded.get_host_and_port()
    yield f"http://{host}:{port}"
    threaded.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> RemotePath:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    if not store.exists(BUCKET):
        store.mkdir(BUCKET)
    return RemotePath(f"s3://{BUCKET}/{uuid.uuid4().hex}")


@pytest.fixture
def memory() -> RemotePath:
    pytest.importorskip("fsspec")
    return RemotePath(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(params=["file system", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    """An empty folder."""
    if request.param == "file system":
        return tmp_path
    store: RemotePath = request.getfixturevalue(request.param)
    return store
