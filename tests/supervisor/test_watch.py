"""Which checkpoints an evaluator takes: whole ones, each once, in order. The clock is the test's."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import pytest

from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory
from phalanx.evaluator import checkpoint_watcher as watching
from phalanx.evaluator.checkpoint_watcher import DELIVERY_TIMEOUT_S, GIVE_UP_S, CheckpointWatcher, FoundCheckpoint
from tests.supervisor.models import make_data, make_model


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trained model's checkpoints: Keras's two kinds, and ours."""
    folder = tmp_path_factory.mktemp("files")
    model = make_model()
    model.fit(*make_data(), batch_size=16, epochs=1, verbose=0)
    model.save(folder / "whole.keras")
    model.save_weights(folder / "whole.weights.h5")
    ours = CheckpointDirectory(folder).save(model, 10)
    return {".keras": folder / "whole.keras", ".weights.h5": folder / "whole.weights.h5", "ours": ours}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.fixture
def watch(tmp_path: Path, folder: Path, clock: Clock) -> CheckpointWatcher:
    (tmp_path / "scratch").mkdir()
    return CheckpointWatcher(folder, tmp_path / "scratch", ignored="best", clock=clock)


def put(source: Path, folder: Path, name: str, *, at: int = 0) -> Path:
    """A file as if it was last written at that second."""
    place = folder / name
    shutil.copyfile(source, place)
    os.utime(place, (at, at))
    return place


def settled(watch: CheckpointWatcher, clock: Clock) -> FoundCheckpoint | None:
    """What is found when a file has been left alone."""
    found = watch.next()
    assert found is None, "not before it was left alone"
    clock.now += DELIVERY_TIMEOUT_S
    return watch.next()


@pytest.mark.parametrize("kind", [".keras", ".weights.h5"])
def test_a_file_of_keras_is_taken_once_when_it_was_left_alone(
    kind: str, files: dict[str, Path], folder: Path, watch: CheckpointWatcher, clock: Clock
) -> None:
    put(files[kind], folder, f"epoch-7{kind}")
    found = settled(watch, clock)
    assert found is not None
    assert (found.name, found.step) == (f"epoch-7{kind}", 10)
    assert found.copy.read_bytes() == files[kind].read_bytes()
    other = make_model(seed=2)
    other.load_weights(found.weights)
    clock.now += 1000
    assert watch.next() is None


def test_ours_is_taken_at_once(files: dict[str, Path], folder: Path, watch: CheckpointWatcher) -> None:
    put(files["ours"], folder, files["ours"].name)
    found = watch.next()
    assert found is not None
    assert found.step == 10
    assert watch.next() is None


@pytest.mark.parametrize("kind", [".keras", ".weights.h5"])
def test_a_file_that_is_written_slowly_is_never_taken_before_it_is_whole(
    kind: str, files: dict[str, Path], folder: Path, watch: CheckpointWatcher, clock: Clock
) -> None:
    content = files[kind].read_bytes()
    place = folder / f"slow{kind}"
    with open(place, "wb", buffering=0) as file:
        for start in range(0, len(content), 1000):
            file.write(content[start : start + 1000])
            if start + 1000 < len(content):
                assert watch.next() is None
                clock.now += 3 * DELIVERY_TIMEOUT_S  # slower than it takes to be taken for left alone
                assert watch.next() is None
    found = settled(watch, clock)
    assert found is not None
    assert found.copy.read_bytes() == content


def test_a_file_that_stays_damaged_is_left_out_with_a_warning(
    files: dict[str, Path], folder: Path, watch: CheckpointWatcher, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    place = put(files[".weights.h5"], folder, "cut.weights.h5")
    os.truncate(place, place.stat().st_size // 2)
    assert settled(watch, clock) is None
    assert watch.pending
    clock.now += GIVE_UP_S
    with caplog.at_level(logging.WARNING):
        assert watch.next() is None
    assert not watch.pending
    assert f"{place} is left out: it is not a complete weights file" in caplog.text
    # Written again, it is another one.
    put(files[".weights.h5"], folder, "cut.weights.h5", at=5)
    assert settled(watch, clock) is not None


def test_ours_that_is_damaged_is_left_out_at_once(
    files: dict[str, Path], folder: Path, watch: CheckpointWatcher, caplog: pytest.LogCaptureFixture
) -> None:
    place = put(files["ours"], folder, files["ours"].name)
    content = bytearray(place.read_bytes())
    content[100] ^= 1
    place.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert watch.next() is None
    assert not watch.pending
    assert "its content is not what was written" in caplog.text


def test_it_begins_with_the_newest_and_goes_on_in_order(
    files: dict[str, Path], folder: Path, watch: CheckpointWatcher, clock: Clock
) -> None:
    for second, name in enumerate(("a", "c", "b"), 1):
        put(files["ours"], folder, f"{name}.weights.h5", at=second)
    first = watch.next()
    assert first is not None
    assert first.name == "b.weights.h5"
    assert watch.next() is None
    for second, name in enumerate(("z", "y", "x"), 4):
        put(files["ours"], folder, f"{name}.weights.h5", at=second)
    taken = [watch.next() for _ in range(4)]
    assert [found and found.name for found in taken] == ["z.weights.h5", "y.weights.h5", "x.weights.h5", None]


def test_a_file_that_is_written_again_is_another_checkpoint(
    files: dict[str, Path], folder: Path, watch: CheckpointWatcher, clock: Clock
) -> None:
    put(files[".weights.h5"], folder, "latest.weights.h5", at=1)
    assert settled(watch, clock) is not None
    put(files[".weights.h5"], folder, "latest.weights.h5", at=2)
    assert settled(watch, clock) is not None


def test_ours_that_is_saved_again_with_the_same_weights_is_not(
    folder: Path, watch: CheckpointWatcher, files: dict[str, Path]
) -> None:
    model = make_model()
    model.load_weights(files["ours"])
    directory = CheckpointDirectory(folder)
    directory.save(model, 10, {"epoch": 1})
    assert watch.next() is not None
    directory.save(model, 10, {"epoch": 2})
    assert watch.next() is None
    assert not watch.pending
    model.layers[0].kernel.assign_add(model.layers[0].kernel)
    directory.save(model, 10, {"epoch": 2})
    assert watch.next() is not None, "trained again, after going back"


def test_a_file_that_is_written_while_it_is_copied_is_not_taken(
    files: dict[str, Path], folder: Path, watch: CheckpointWatcher, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = put(files[".weights.h5"], folder, "latest.weights.h5", at=1)
    watch.next()
    clock.now += DELIVERY_TIMEOUT_S
    copy = shutil.copyfileobj

    def copy_and_write(source: Any, target: Any, length: int) -> None:
        copy(source, target, length)
        os.utime(place, (2, 2))

    monkeypatch.setattr(watching.shutil, "copyfileobj", copy_and_write)
    assert watch.next() is None
    monkeypatch.undo()
    assert settled(watch, clock) is not None


def test_whoever_writes_is_not_disturbed(
    files: dict[str, Path], folder: Path, watch: CheckpointWatcher, clock: Clock
) -> None:
    """HDF5 locks a file that it reads, so a process that wants to write it fails."""
    place = put(files[".weights.h5"], folder, "latest.weights.h5", at=1)
    found = settled(watch, clock)
    assert found is not None
    with h5py.File(found.weights, "r"), h5py.File(place, "w"):
        pass


def test_one_that_is_deleted_before_its_turn_is_passed_over(
    files: dict[str, Path], folder: Path, watch: CheckpointWatcher, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    place = put(files[".keras"], folder, "a.keras")
    assert watch.next() is None
    place.unlink()
    with caplog.at_level(logging.INFO):
        assert watch.next() is None
    assert not watch.pending
    assert "was deleted before its turn" in caplog.text


@pytest.mark.parametrize("name", [".hidden.weights.h5", "best_evaluation.weights.h5", "log.txt", "finished", "old.h5"])
def test_other_files_are_no_checkpoints(
    name: str, files: dict[str, Path], folder: Path, watch: CheckpointWatcher
) -> None:
    put(files["ours"], folder, name)
    assert watch.next() is None
    assert not watch.pending


def test_a_directory_that_is_not_there_yet_has_none(tmp_path: Path, clock: Clock) -> None:
    assert CheckpointWatcher(tmp_path / "later", tmp_path, clock=clock).next() is None


def test_the_number_in_a_name_is_the_step_where_no_optimizer_was_saved(
    folder: Path, watch: CheckpointWatcher, clock: Clock
) -> None:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.save_weights(folder / "model-2-epoch-0012.weights.h5")
    found = settled(watch, clock)
    assert found is not None
    assert found.step == 12


def test_a_directory_that_is_gone_for_a_moment_is_known_again(
    files: dict[str, Path], folder: Path, watch: CheckpointWatcher
) -> None:
    put(files["ours"], folder, "checkpoint-1.weights.h5")
    assert watch.next() is not None
    away = folder.rename(folder.with_name("away"))
    assert watch.next() is None
    assert not watch.pending
    away.rename(folder)
    assert watch.next() is None
