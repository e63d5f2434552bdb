"""What Keras itself saves and loads, with URLs, on every backend and without TensorFlow's `gfile`."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import phalanx.callbacks  # noqa: F401  # installs the hook
from phalanx.keras_compat.saving import remote_files
from phalanx.storage.files import list_files, list_names
from phalanx.storage.remote_path import RemotePath
from tests.supervisor.models import make_data, make_model


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> RemotePath:
    found: RemotePath = request.getfixturevalue(request.param)
    return found


def fit(model: Any, epochs: int, *callbacks: Any) -> Any:
    return model.fit(*make_data(), batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks])


def assert_same_weights(one: Any, other: Any) -> None:
    for left, right in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", ["whole.keras", "only.weights.h5"])
def test_a_model_is_saved_to_a_store_and_loaded_from_it(store: RemotePath, name: str) -> None:
    model, path = make_model(), str(store / name)
    if name.endswith(".keras"):
        model.save(path)
        again = keras.models.load_model(path)
    else:
        model.save_weights(path)
        again = make_model(seed=2)
        again.load_weights(path)
    assert_same_weights(again, model)
    assert list_names(store) == [name]


def test_callbacks_write_to_a_store(store: RemotePath) -> None:
    model = make_model()
    fit(
        model,
        2,
        keras.callbacks.ModelCheckpoint(f"{store}/epochs/{{epoch}}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(str(store / "history.csv")),
    )
    assert sorted(list_names(store / "epochs")) == ["1.weights.h5", "2.weights.h5"]
    assert len((store / "history.csv").read_bytes().splitlines()) == 3
    again = make_model(seed=2)
    again.load_weights(f"{store}/epochs/2.weights.h5")
    assert_same_weights(again, model)


@pytest.mark.parametrize("double_checkpoint", [False, True])
def test_a_backup_in_a_store_is_restored(store: RemotePath, double_checkpoint: bool) -> None:
    def backup(**options: Any) -> Any:
        return keras.callbacks.BackupAndRestore(str(store / "backup"), double_checkpoint=double_checkpoint, **options)

    straight, interrupted, resumed = make_model(), make_model(), make_model()
    fit(straight, 3)
    fit(interrupted, 2, backup(delete_checkpoint=False))
    assert len(list_names(store / "backup")) == (4 if double_checkpoint else 2)
    history = fit(resumed, 3, backup())
    assert history.epoch == [2]
    assert_same_weights(resumed, straight)
    assert list_names(store / "backup") == []


def test_tensorboard_writes_to_a_store(memory: RemotePath) -> None:
    pytest.importorskip("tensorflow")
    board = keras.callbacks.TensorBoard(str(memory / "logs"))
    seen: list[int] = []

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(sum(file.identity[1] for file in list_files(memory / "logs" / "train")))

    model = make_model()
    model.fit(*make_data(), epochs=2, verbose=0, validation_split=0.2, callbacks=[board, Look()])
    assert board.log_dir == str(memory / "logs")
    (name,) = list_names(memory / "logs" / "train")
    assert b"epoch_loss" in (memory / "logs" / "train" / name).read_bytes()
    assert list_names(memory / "logs" / "validation")
    assert seen[0] < seen[1], "what the first epoch logged is there before the second"


def test_evaluations_with_tensorboard_leave_no_folders_behind(
    memory: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorflow")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board = keras.callbacks.TensorBoard(str(memory / "logs"))
    model = make_model()
    for _ in range(3):
        model.evaluate(*make_data(), verbose=0, callbacks=[board])
    assert len(list_names(memory / "logs" / "validation")) == 3
    assert len(list(tmp_path.iterdir())) == 1
    del board, model
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_without_the_package_of_a_store_a_url_is_left_to_keras() -> None:
    function = remote_files._prefer_store(lambda path: ("Keras", path), lambda path: ("store", path))
    assert function("nowhere://bucket/one") == ("Keras", "nowhere://bucket/one")
    assert function("runs/one") == ("Keras", "runs/one")
    assert function("memory://one") == ("store", "memory://one")
