"""The same contract for files in a file system, in fsspec's memory and on a server that speaks S3."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest

from phalanx.storage.files import (
    commit_file,
    copy_file,
    copy_if_unchanged,
    list_files,
    list_names,
    local_copy,
    read_end,
    rename,
    staged_file,
    write_file,
)
from phalanx.storage.mirror import MirroredDirectory
from phalanx.storage.paths import StoragePath
from phalanx.storage.remote_path import RemotePath
from phalanx.storage.temporary_directory import temporary_directory


def test_a_file_is_written_read_listed_renamed_and_deleted(folder: StoragePath) -> None:
    place = folder / "one"
    assert not place.exists()
    assert list_names(folder / "absent") == []
    write_file(place, b"content")
    write_file(place, b"another")
    assert place.exists()
    assert folder.is_dir()
    assert not place.is_dir()
    assert place.read_bytes() == b"another"
    assert list_names(folder) == ["one"]
    assert (read_end(place, 5), read_end(place, 100)) == (b"other", b"another")
    rename(place, folder / "two")
    assert list_names(folder) == ["two"]
    (folder / "two").unlink()
    assert list_names(folder) == []
    place.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        place.read_bytes()


def test_staged_content_has_its_name_when_it_is_whole_and_not_before(folder: StoragePath) -> None:
    place = folder / "one"
    write_file(place, b"former")

    def write(file: BinaryIO) -> None:
        file.write(b"new ")
        assert place.read_bytes() == b"former"
        file.write(b"content")

    with staged_file(place, write) as whole:
        assert place.read_bytes() == b"former"
        assert all(name.startswith(".") for name in list_names(folder) if name != "one"), "hidden"
        commit_file(whole, place)
    assert place.read_bytes() == b"new content"
    assert list_names(folder) == ["one"]


def test_a_write_that_fails_leaves_the_former_content_and_nothing_else(folder: StoragePath) -> None:
    place = folder / "one"
    write_file(place, b"former")

    def write(file: BinaryIO) -> None:
        file.write(b"a part")
        raise OSError("full")

    with pytest.raises(OSError, match="full"), staged_file(place, write):
        pytest.fail("it is not whole")
    assert place.read_bytes() == b"former"
    assert list_names(folder) == ["one"]


def test_another_content_has_another_identity(folder: StoragePath, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    place, copy = folder / "one", tmp_path / "copies" / "one"
    write_file(place, b"first")
    (file,) = list_files(folder)
    assert copy_if_unchanged(place, file.identity, copy)
    assert copy.read_bytes() == b"first"
    write_file(place, b"later")
    assert not copy_if_unchanged(place, file.identity, copy)
    (later,) = list_files(folder)
    assert later.identity != file.identity
    assert later.modified_ns >= file.modified_ns


def test_a_file_is_copied_there_and_back(folder: StoragePath, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 50000)
    copy_file(source, folder / "target")
    with local_copy(folder / "target") as copy:
        assert copy.read_bytes() == source.read_bytes()


def test_files_of_a_mirrored_folder_appear(folder: StoragePath) -> None:
    mirrored = MirroredDirectory(folder / "logs")
    (mirrored.path / "validation").mkdir(parents=True)
    event_file = mirrored.path / "validation" / "events"
    event_file.write_bytes(b"1")
    mirrored.upload()
    event_file.write_bytes(b"12")
    mirrored.upload()
    assert (folder / "logs" / "validation" / "events").read_bytes() == b"12"
    mirrored.close()
    assert (folder / "logs" / "validation" / "events").read_bytes() == b"12"
    assert mirrored.path.exists() == isinstance(folder, Path)


def test_logs_of_an_outage_appear_with_the_next_upload(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mirrored = MirroredDirectory(memory)
    (mirrored.path / "events").write_bytes(b"1")

    def fail(*args: object) -> None:
        raise OSError("no route to the store")

    with monkeypatch.context() as outage:
        outage.setattr(RemotePath, "write", fail)
        mirrored.upload()
    assert "no route to the store" in caplog.text
    mirrored.upload()
    mirrored.close()
    assert (memory / "events").read_bytes() == b"1"


def test_a_store_that_does_not_answer_is_an_os_error(memory: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.implementations.memory

    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("no class of Python's for the network")

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "cat_file", fail)
    with pytest.raises(OSError, match="ZeroDivisionError: no class of Python's"):
        (memory / "one").read_bytes()
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "info", fail)
    for ask in (RemotePath.exists, RemotePath.is_dir):
        with pytest.raises(OSError, match="ZeroDivisionError: no class of Python's"):
            ask(memory / "one")


def test_copies_of_a_killed_process_are_removed_by_the_next_one(
    memory: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write_file(memory / "one", b"content")
    begun, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        mirrored = MirroredDirectory(memory)
        with local_copy(memory / "one") as copy:
            (mirrored.path / "events").touch()
            assert copy.exists()
            os.write(done, b"!")
            signal.pause()
    os.close(done)
    assert os.read(begun, 1)
    os.close(begun)
    assert len(list(tmp_path.iterdir())) == 2
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with temporary_directory() as own:
        assert list(tmp_path.iterdir()) == [own]


def test_a_temporary_directory_that_another_process_removes_at_once_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks abandoned until it is locked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real, removed = os.open, list[str]()

    def late(path: str, *args: int, **options: int) -> int:
        if not removed:
            removed.append(path)
            os.rmdir(path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", late)
    with temporary_directory() as folder:
        assert folder.is_dir()
        assert str(folder) not in removed
