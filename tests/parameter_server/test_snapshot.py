"""The two files of a server's snapshots."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from phalanx.parameter_server.server.snapshots import Snapshots

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(7, np.int64),
    np.zeros((0, 4), np.float32),
    np.array([1.5, 2.5], ml_dtypes.bfloat16),
]


def contents(snapshots: Snapshots) -> tuple[bytes, list[bytes]] | None:
    found = snapshots.newest()
    return None if found is None else (found[0], [bytes(buffer) for buffer in found[1]])


def test_there_is_none_at_first(tmp_path: Path) -> None:
    assert Snapshots.of_task(tmp_path / "new", "ps/0").newest() is None


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    Snapshots.of_task(tmp_path, "ps/0").write(b"header", ARRAYS)
    assert contents(Snapshots.of_task(tmp_path, "ps/0")) == (b"header", [array.tobytes() for array in ARRAYS])


def test_the_newest_counts_also_after_another_process_went_on(tmp_path: Path) -> None:
    first = Snapshots.of_task(tmp_path, "ps/0")
    for header in (b"1", b"2", b"3"):
        first.write(header, [])
    second = Snapshots.of_task(tmp_path, "ps/0")
    assert contents(second) == (b"3", [])
    second.write(b"4", [])
    assert contents(Snapshots.of_task(tmp_path, "ps/0")) == (b"4", [])


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "text"])
def test_a_damaged_one_is_left_aside_for_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = Snapshots.of_task(tmp_path, "ps/0")
    snapshots.write(b"old", ARRAYS)
    before = set(tmp_path.glob("*.npz"))
    snapshots.write(b"new", ARRAYS)
    (newest,) = set(tmp_path.glob("*.npz")) - before
    content = bytearray(newest.read_bytes())
    if damage == "flipped":
        place = content.index(ARRAYS[0].tobytes())
        content[place] ^= 0xFF
    newest.write_bytes(
        {"cut": content[: len(content) // 2], "emptied": b"", "text": b"no archive"}.get(damage, content)
    )
    assert contents(Snapshots.of_task(tmp_path, "ps/0")) == (b"old", [array.tobytes() for array in ARRAYS])
    assert ("is damaged and ignored" in caplog.text) == (damage != "emptied")


def test_files_without_a_name_serve_as_well(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w+b") as first, open(tmp_path / "b", "w+b") as second:
        for file in (first, second):
            Path(file.name).unlink()
        paths = (Path(f"/dev/fd/{first.fileno()}"), Path(f"/dev/fd/{second.fileno()}"))
        snapshots = Snapshots(paths)
        assert snapshots.newest() is None
        for header in (b"1", b"2"):
            snapshots.write(header, ARRAYS)
        found = contents(Snapshots(paths))
        assert found is not None
        assert found[0] == b"2"
        snapshots.clear()


def test_a_full_disk_is_an_error_and_costs_nothing_that_was_there(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    Snapshots((tmp_path / "other", whole)).write(b"1", ARRAYS)
    snapshots = Snapshots((Path("/dev/full"), whole))
    assert contents(snapshots) is not None
    for header in (b"2", b"3"):  # each again into the file that is not whole
        with pytest.raises(OSError, match="No space left"):
            snapshots.write(header, ARRAYS)
    assert contents(Snapshots((tmp_path / "other", whole))) == (b"1", [array.tobytes() for array in ARRAYS])


def test_nothing_stays_when_all_is_over(tmp_path: Path) -> None:
    snapshots = Snapshots.of_task(tmp_path, "ps/0")
    snapshots.write(b"1", [])
    snapshots.write(b"2", [])
    snapshots.clear()
    assert list(tmp_path.glob("*.npz")) == []


@pytest.mark.parametrize(("offset", "value"), [(6, 0xFF), (8, 0x01)], ids=["unknown version", "encrypted"])
def test_one_whose_directory_is_damaged_is_left_aside(tmp_path: Path, offset: int, value: int) -> None:
    first = Snapshots.of_task(tmp_path, "ps/0")
    paths = []
    for header in (b"1", b"2"):
        first.write(header, ARRAYS)
        paths.append(first._paths[first._number % 2])
    content = bytearray(paths[1].read_bytes())
    content[content.index(b"PK\x01\x02") + offset] = value  # in the first entry of the directory, as zip has it
    paths[1].write_bytes(content)
    assert contents(Snapshots.of_task(tmp_path, "ps/0")) == (b"1", [array.tobytes() for array in ARRAYS])
