"""CheckpointDirectory are whole or not there, and the newest whole one is found."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.checkpoint import checkpoint_directory
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory, DamagedCheckpointError, read
from phalanx.checkpoint.checkpoint_series import ABANDONED_SUFFIX
from phalanx.errors import ConfigurationError
from tests.supervisor.models import make_data, make_model, state_of
from tests.support import fork_server
from tests.support.backends import FIRST
from tests.support.commands import ROOT
from tests.support.programs import check_python, environment

OTHER_UID = 65534


@pytest.fixture
def trained() -> Any:
    model = make_model()
    model.fit(*make_data(), batch_size=16, epochs=1, verbose=0)
    return model


def assert_same(left: list[Any], right: list[Any]) -> None:
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_off_the_end(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [cut_off, cut_off_the_end, flip_a_bit, empty]


def test_weights_optimizer_and_step_come_back(tmp_path: Path, trained: Any) -> None:
    directory = CheckpointDirectory(tmp_path / "new" / "folder")
    directory.save(trained, 10, {"epoch": 1})
    other = make_model(seed=2)
    found = directory.restore(other)
    assert found is not None
    assert (found.step, found.state["epoch"]) == (10, 1)
    assert_same(state_of(other), state_of(trained))


def test_keras_reads_the_file_as_it_is(tmp_path: Path, trained: Any) -> None:
    path = CheckpointDirectory(tmp_path).save(trained, 10)
    assert path.name == "model.ckpt-000000010.weights.h5"
    other = make_model(seed=2)
    other.load_weights(path)
    assert_same(other.get_weights(), trained.get_weights())


def test_an_empty_directory_and_none_have_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointDirectory(tmp_path).restore(make_model()) is None
    assert CheckpointDirectory(tmp_path / "absent").restore(make_model()) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_skipped_with_a_warning(
    tmp_path: Path, trained: Any, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    directory = CheckpointDirectory(tmp_path)
    directory.save(trained, 10)
    before = state_of(trained)
    trained.fit(*make_data(), batch_size=16, epochs=1, verbose=0)
    newest = directory.save(trained, 20)
    damage(newest)
    with pytest.raises(DamagedCheckpointError):
        read(newest)
    other = make_model(seed=2)
    with caplog.at_level(logging.WARNING):
        found = directory.restore(other)
    assert found is not None
    assert found.step == 10
    assert_same(state_of(other), before)
    assert f"{newest} is damaged" in caplog.text
    assert "Trying the one before" in caplog.text
    assert [path.name for path in directory.paths()] == ["model.ckpt-000000010.weights.h5"]
    assert newest.with_name(newest.name + ".damaged").exists()


def test_if_all_are_damaged_nothing_starts_over(tmp_path: Path, trained: Any) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2):
        cut_off(directory.save(trained, step))
    with pytest.raises(ConfigurationError, match=r"None of the checkpoints in .* can be read: .*Move them away"):
        directory.restore(make_model())
    assert len(directory.paths()) == 2


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, trained: Any) -> None:
    directory = CheckpointDirectory(tmp_path)
    directory.save(trained, 10)
    with pytest.raises(ConfigurationError, match="is of another model"):
        directory.restore(make_model(width=5))


def test_the_newest_few_are_kept(tmp_path: Path, trained: Any) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    for step in (5, 999_999_999, 1_000_000_000):
        directory.save(trained, step)
    steps = [read(path).step for path in directory.paths()]
    assert steps == [999_999_999, 1_000_000_000]
    with pytest.raises(ConfigurationError, match="0 checkpoints are to be kept"):
        CheckpointDirectory(tmp_path, keep=0)


def test_what_a_killed_process_left_is_not_seen_and_swept_away(tmp_path: Path, trained: Any) -> None:
    directory = CheckpointDirectory(tmp_path)
    left = tmp_path / ".model.ckpt-000000010.123.weights.h5"
    left.write_bytes(b"half")
    assert directory.restore(trained) is None
    directory.remove_partial_files()
    assert not left.exists()


def test_checkpoints_of_a_longer_name_are_left_alone(tmp_path: Path, trained: Any) -> None:
    others = [f".model.ckpt-b-{10:09}.weights.h5.7-ab", *(f"model.ckpt-b-{n:09}.weights.h5.abandoned" for n in (1, 2))]
    for name in others:
        (tmp_path / name).touch()
    directory = CheckpointDirectory(tmp_path, keep=1)
    directory.remove_partial_files()
    for step in (2, 1):  # the later one is abandoned
        directory.save(trained, step)
    assert all((tmp_path / name).exists() for name in others)


def test_a_directory_that_is_not_writable_is_named(tmp_path: Path, trained: Any) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(OTHER_UID)
    try:
        with pytest.raises(PermissionError, match="The checkpoint of step 10 cannot be written") as caught:
            CheckpointDirectory(folder).save(trained, 10)
    finally:
        if root:
            os.seteuid(0)
    assert str(folder) in str(caught.value)


FULL = """
import sys
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory
from tests.supervisor.models import make_model
import resource
model = make_model(width=int(sys.argv[2]))
directory = CheckpointDirectory(sys.argv[1])
directory.save(model, 1)
size = directory.paths()[0].stat().st_size
for part in range(1, 10):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * part // 10, resource.RLIM_INFINITY))
    try:
        directory.save(model, 2)
    except OSError as error:
        print(error)
    else:
        sys.exit("it was written")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
directory.save(model, 3)
"""


def test_a_disk_that_is_full_leaves_nothing_half_and_the_process_alive(tmp_path: Path) -> None:
    output = check_python("-c", FULL, str(tmp_path), "20000", backend=FIRST)
    assert output.count("The checkpoint of step 2 cannot be written (File too large)") == 9, output
    assert [read(path).step for path in sorted(tmp_path.glob("*.h5"))] == [1, 3]


KILLED = """
import sys
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory
from tests.supervisor.models import make_model
model = make_model(width=20000)
directory = CheckpointDirectory(sys.argv[1], keep=3)
step = 0
while True:
    step += 1
    directory.save(model, step)
    print(step, flush=True)
"""


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_whoever_is_killed_while_writing_leaves_whole_checkpoints(tmp_path: Path, rounds: int) -> None:
    for round_ in range(rounds):
        folder = tmp_path / str(round_)
        process = fork_server.popen(
            [sys.executable, "-c", KILLED, str(folder)],
            env=environment(FIRST),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process:
            for _ in range(4 + round_):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        found = [read(path).step for path in CheckpointDirectory(folder).paths()]
        assert len(found) >= 3
        assert found == sorted(found)


def test_a_sum_of_a_file_that_is_not_ours_is_not_asked_for(tmp_path: Path, trained: Any) -> None:
    path = tmp_path / "own.weights.h5"
    trained.save_weights(path)
    assert not checkpoint_directory.is_sealed(path)
    assert checkpoint_directory.is_sealed(CheckpointDirectory(tmp_path).save(trained, 1))


def test_after_going_back_the_newest_is_what_was_written_last(tmp_path: Path, trained: Any) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    for step in (10, 20, 30, 5, 6):
        assert directory.save(trained, step).exists()
    newest = directory.newest()
    assert newest is not None
    assert newest.step == 6
    assert [path.name for path in directory.paths()] == [directory.path_of(step).name for step in (5, 6)]
    abandoned = sorted(path.name for path in tmp_path.glob(f"*{ABANDONED_SUFFIX}"))
    assert abandoned == [directory.path_of(step).name + ABANDONED_SUFFIX for step in (20, 30)]
    for _ in range(3):
        for step in (40, 7):
            directory.save(trained, step)
    assert len(list(tmp_path.glob(f"*{ABANDONED_SUFFIX}"))) == 2, "of these, too, the newest are kept"


def test_a_reader_finds_the_newest_while_a_writer_deletes_what_it_has_listed(
    tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers without a strategy do, which wait for the chief's checkpoints."""
    writer, reader = CheckpointDirectory(tmp_path, keep=1), CheckpointDirectory(tmp_path)
    writer.save(trained, 1)
    written = [1]

    def meanwhile(real: Callable[..., Any], moments: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if written[-1] <= moments:
                written.append(written[-1] + 1)
                writer.save(trained, written[-1])
            return real(*args)

        return call

    monkeypatch.setattr(checkpoint_directory, "read", meanwhile(read, 2))  # between the listing and the reading
    monkeypatch.setattr(checkpoint_directory, "load", meanwhile(checkpoint_directory.load, 4))
    other = make_model(seed=2)
    found = reader.restore(other, rename_damaged=False)
    assert found is not None
    assert found.step == written[-1] == 5
    assert_same(state_of(other), state_of(trained))


def test_a_checkpoint_that_is_saved_again_while_it_is_read_is_not_damaged(
    tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CheckpointDirectory(tmp_path)
    path = directory.save(trained, 1, {"epoch": 1})
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:  # the file is open then
        monkeypatch.setattr(os, "fstat", real)
        directory.save(trained, 1, {"epoch": 2})
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", fstat)
    assert read(path).state["epoch"] == 1
    assert read(path).state["epoch"] == 2
