from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.runtime import progress


def reporter(path: Path) -> progress._Reporter:
    path.write_bytes(progress.blank())
    return progress._Reporter(str(path))


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record"
    reporter(path).report("all_reduce", epoch=1, step=37)
    last = progress.parse(path.read_bytes())
    assert last is not None
    assert (last.phase, last.epoch, last.step) == ("all_reduce", 1, 37)


def test_the_last_report_replaces_the_ones_before(tmp_path: Path) -> None:
    path = tmp_path / "record"
    own = reporter(path)
    own.report("a long name of a phase", epoch=3, step=2)
    own.report("end")
    last = progress.parse(path.read_bytes())
    assert last is not None
    assert (last.phase, last.epoch, last.step) == ("end", None, None)


def test_a_long_name_is_cut_and_a_broken_character_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "record"
    reporter(path).report("x" * (progress.PHASE_BYTES - 1) + "\N{EURO SIGN}")
    last = progress.parse(path.read_bytes())
    assert last is not None
    assert last.phase.startswith("x" * (progress.PHASE_BYTES - 1))


def test_before_the_first_report_there_is_none() -> None:
    assert progress.parse(progress.blank()) is None
    assert progress.parse(b"") is None


def test_a_record_that_is_being_written_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "record"
    reporter(path).report("step")
    content = bytearray(path.read_bytes())
    content[len(progress.MAGIC)] ^= 1
    assert progress.parse(bytes(content)) is None


@pytest.mark.parametrize("content", [b"", b"mine", b"x" * progress.RECORD_BYTES])
def test_a_file_that_is_not_a_record_is_never_written_to(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    progress._Reporter(str(path)).report("step", epoch=1)
    assert path.read_bytes() == content


@pytest.mark.parametrize("path", [None, "", "/nowhere/at/all", "/dev/null", os.sep])
def test_without_a_launcher_a_report_does_nothing(path: str | None) -> None:
    progress._Reporter(path).report("step")
