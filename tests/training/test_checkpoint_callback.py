"""`phalanx.callbacks.Checkpoint` in one process without a strategy: what a `fit` that was broken off has when it is
called again. Jobs of several processes: `test_resuming.py`."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import phalanx
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory
from phalanx.checkpoint.fit_writer import FitWriter
from phalanx.errors import ConfigurationError, PreemptedError
from phalanx.training import checkpointing, fit_resumption
from tests.support.seeds import set_random_seed

pytestmark = pytest.mark.timeout(600)

SAMPLES, BATCH, EPOCHS = 100, 8, 4
STEPS = 13  # in an epoch


class Broken(Exception):
    """Ends a `fit` in its middle."""


class BreakOff(keras.callbacks.Callback):
    def __init__(self, step: int):
        super().__init__()
        self._step = step
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._done += 1
        if self._done == self._step:
            raise Broken


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """Each test is a program of its own."""
    fit_resumption._finished.clear()
    yield
    fit_resumption._finished.clear()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint is left out because the one before is still being written."""
    begin = FitWriter.begin
    monkeypatch.setattr(FitWriter, "begin", lambda self, *saved: begin(self, *saved) and self.wait())


def data(samples: int = SAMPLES) -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(samples, 6)).astype("float32")
    return x, x[:, :1] * 2 + 1


def model(dropout: float = 0.0) -> Any:
    set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(dropout)]
    made = keras.Sequential([*layers, keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], run_eagerly=True)  # compiling takes longer
    return made


def fit(folder: Path, *others: Any, dropout: float = 0.0, arguments: Any = None, **options: Any) -> Any:
    made = model(dropout)
    callback = phalanx.callbacks.Checkpoint(folder, **{"every_steps": 5, **options})
    x, y = data()
    settings = {"x": x, "y": y, "batch_size": BATCH, "epochs": EPOCHS, "verbose": 0, **(arguments or {})}
    made.fit(**settings, callbacks=[callback, *others])
    return made


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.weights.h5"))


def same(first: Any, second: Any) -> None:
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert first.history.epoch == second.history.epoch
    for name, values in first.history.history.items():
        np.testing.assert_allclose(values, second.history.history[name], rtol=1e-5)


@pytest.mark.parametrize("broken_at", [17, STEPS, pytest.param(2 * STEPS + 12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_fit_that_was_broken_off_ends_with_the_same_model_and_history(
    tmp_path: Path, broken_at: int, dropout: float
) -> None:
    undisturbed = fit(tmp_path / "a", dropout=dropout)
    with pytest.raises(Broken):
        fit(tmp_path / "b", BreakOff(broken_at), dropout=dropout)
    assert checkpoints(tmp_path / "b")
    same(undisturbed, fit(tmp_path / "b", dropout=dropout))
    assert all((counts == 1).all() for counts in phalanx.data.ledger().values())
    assert sorted(phalanx.data.ledger()) == list(range(EPOCHS))


def test_a_checkpoint_after_the_last_step_of_an_epoch_goes_on_with_its_end(tmp_path: Path, at_once: None) -> None:
    def break_off(epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise Broken

    validated = {"validation_split": 0.2}
    steps = {"every_steps": SAMPLES * 8 // 10 // BATCH}
    undisturbed = fit(tmp_path / "a", arguments=validated, **steps)
    with pytest.raises(Broken):
        fit(tmp_path / "b", keras.callbacks.LambdaCallback(on_epoch_end=break_off), arguments=validated, **steps)
    assert checkpoints(tmp_path / "b")[-1] == "fit0-000000020.weights.h5"
    same(undisturbed, fit(tmp_path / "b", arguments=validated, **steps))


def test_epochs_that_are_parts_of_a_pass_go_on_within_it(tmp_path: Path) -> None:
    parts = {"steps_per_epoch": 5}
    undisturbed = fit(tmp_path / "a", arguments=parts)
    for broken_at in (7, 10):  # in an epoch, and where one ends
        with pytest.raises(Broken):
            fit(tmp_path / "b", BreakOff(broken_at), arguments=parts)
    same(undisturbed, fit(tmp_path / "b", arguments=parts))


def test_other_callbacks_remember_what_they_knew(tmp_path: Path) -> None:
    def stopping() -> Any:
        return keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, restore_best_weights=True)

    undisturbed = fit(tmp_path / "a", stopping())
    assert len(undisturbed.history.epoch) == 2
    with pytest.raises(Broken):
        fit(tmp_path / "b", stopping(), BreakOff(STEPS + 11))
    same(undisturbed, fit(tmp_path / "b", stopping()))
    fit_resumption._finished.clear()
    same(undisturbed, fit(tmp_path / "b", stopping()))  # is over, with the best weights


def test_what_callbacks_are_given_before_the_training_is_not_learnt(tmp_path: Path) -> None:
    class Placed(keras.callbacks.Callback):
        """Derives where it writes when it gets its model, as `TensorBoard` does."""

        def __init__(self, place: str):
            super().__init__()
            self._place = place

        def set_model(self, model: Any) -> None:
            super().set_model(model)
            self.writes_to = f"{self._place}/train"

    with pytest.raises(Broken):
        fit(tmp_path, Placed("first"), BreakOff(17))
    second = Placed("second")
    fit(tmp_path, second)
    assert second.writes_to == "second/train"


def test_the_newest_are_kept_and_a_finished_fit_is_not_repeated(tmp_path: Path) -> None:
    first = fit(tmp_path, keep=2)
    assert len(checkpoints(tmp_path)) == 2
    assert checkpoints(tmp_path)[-1] == f"fit0-{EPOCHS * STEPS:09}.weights.h5"
    fit_resumption._finished.clear()
    same(first, fit(tmp_path, BreakOff(1), keep=2))  # makes no step
    fit_resumption._finished.clear()
    longer = fit(tmp_path, arguments={"epochs": EPOCHS + 1})
    assert longer.history.epoch == list(range(EPOCHS + 1))


def test_each_fit_of_a_program_has_its_own(tmp_path: Path) -> None:
    def program(*second: Any) -> Any:
        made = model()
        x, y = data()
        for others in ((), second):
            callback = phalanx.callbacks.Checkpoint(tmp_path, every_steps=3)
            made.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[callback, *others])
        return made

    with pytest.raises(Broken):
        program(BreakOff(8))
    fit_resumption._finished.clear()
    program()
    names = {name.partition("-")[0] for name in checkpoints(tmp_path)}
    assert names == {"fit0", "fit1"}


def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_once: None
) -> None:
    undisturbed = fit(tmp_path / "a")
    with pytest.raises(Broken):
        fit(tmp_path / "b", BreakOff(33))
    newest = tmp_path / "b" / checkpoints(tmp_path / "b")[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        same(undisturbed, fit(tmp_path / "b"))
    assert f"{newest} is damaged" in caplog.text


def test_none_that_is_whole_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        fit(tmp_path, BreakOff(8))
    for name in checkpoints(tmp_path):
        (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match=r"None of the checkpoints in .* can be read"):
        fit(tmp_path)


def test_data_of_another_size_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        fit(tmp_path, BreakOff(8))
    x, y = data(SAMPLES + 1)
    with pytest.raises(ConfigurationError, match="data with 100 samples; the data have 101 now"):
        fit(tmp_path, arguments={"x": x, "y": y})
    with pytest.raises(ConfigurationError, match="13 batches in an epoch; the data have 10 now"):
        fit(tmp_path, arguments={"batch_size": 10})


def test_another_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        fit(tmp_path, BreakOff(8))
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    other.compile("adam", "mse")
    with pytest.raises(ConfigurationError, match="is of another model"):
        other.fit(*data(), verbose=0, callbacks=[phalanx.callbacks.Checkpoint(tmp_path)])


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "place").write_text("a file")
    made = fit(tmp_path / "place")
    assert made.history.epoch == list(range(EPOCHS))
    assert "cannot be written" in caplog.text


def test_a_disk_that_is_full_for_a_while_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_once: None
) -> None:
    class Full(keras.callbacks.Callback):
        """Takes the directory away, and gives it back."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                os.rename(tmp_path / "c", tmp_path / "aside")
                (tmp_path / "c").write_text("no directory")
            if epoch == 2:
                (tmp_path / "c").unlink()
                os.rename(tmp_path / "aside", tmp_path / "c")

    with pytest.raises(Broken):
        fit(tmp_path / "c", Full(), BreakOff(2 * STEPS + 11), keep=9)
    assert "Training continues" in caplog.text
    steps = [int(name.partition("-")[2].partition(".")[0]) for name in checkpoints(tmp_path / "c")]
    assert min(steps) < STEPS
    assert max(steps) > 2 * STEPS
    same(fit(tmp_path / "a"), fit(tmp_path / "c"))


@pytest.mark.parametrize(
    ("full_from", "damages", "resumes"),
    [
        (6, False, r": started again, it resumes from .*fit0-000000005\.weights\.h5\."),
        (0, False, r": started again, it resumes from the beginning\."),
        (6, True, r", nor can those before be read: None of the checkpoints in"),
    ],
)
def test_a_job_that_ends_while_the_disk_is_full_says_where_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: None, full_from: int, damages: bool, resumes: str
) -> None:
    original = CheckpointDirectory.write

    def write(self: CheckpointDirectory, content: Any, step: int, state: Any) -> Any:
        if step >= full_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, content, step, state)

    def tell(batch: int, logs: Any = None) -> None:
        if batch == 6:
            for path in tmp_path.glob("*.weights.h5") if damages else ():
                path.write_bytes(b"")
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(CheckpointDirectory, "write", write)
    with pytest.raises(PreemptedError, match=f"could NOT be saved{resumes}"):
        fit(tmp_path, keras.callbacks.LambdaCallback(on_train_batch_end=tell))


def test_what_ends_the_thread_that_writes_is_raised_in_the_one_that_trains(tmp_path: Path) -> None:
    writer = FitWriter(CheckpointDirectory(tmp_path))
    writer.begin(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), 1, lambda: {"state": object()})
    with pytest.raises(TypeError, match="not JSON"):
        writer.wait()


def first_write_waits(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int]]:
    """Lets the first checkpoint in the background wait for the event; the steps of all that have begun."""
    go_on, begun = threading.Event(), []
    original = CheckpointDirectory.write

    def write(self: CheckpointDirectory, content: Any, step: int, state: Any) -> Any:
        begun.append(step)
        if len(begun) == 1:
            assert go_on.wait(60)
        return original(self, content, step, state)

    monkeypatch.setattr(CheckpointDirectory, "write", write)
    return go_on, begun


def test_what_is_due_while_one_is_written_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = first_write_waits(monkeypatch)
    at_ten = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: go_on.set() if batch == 10 else None)
    fit(tmp_path, at_ten, every_steps=1, arguments={"epochs": 1})
    assert begun[0] == 1
    assert begun[1] >= 10  # the newest state, once there is room


def test_an_epoch_that_ends_while_one_is_written_is_saved_as_soon_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun = first_write_waits(monkeypatch)

    class Room(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                go_on.set()
                next(thread for thread in threading.enumerate() if thread.name == "phalanx-checkpoint").join(60)

    fit(tmp_path, Room(), every_steps=None, arguments={"epochs": 3})
    assert begun[0] == STEPS
    assert begun[1] == 2 * STEPS + 1


def test_a_signal_saves_and_ends_at_the_next_step(tmp_path: Path) -> None:
    undisturbed = fit(tmp_path / "a")
    here = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: os.kill(os.getpid(), signal.SIGTERM) if batch == 6 else None
    )
    before = signal.getsignal(signal.SIGTERM)
    folder = tmp_path / "b\udcf6"  # a path is bytes, which need be no text
    with pytest.raises(PreemptedError, match=r"after 8 steps. It resumes from .*fit0-000000008"):
        fit(folder, here, every_steps=1000)
    assert signal.getsignal(signal.SIGTERM) == before
    same(undisturbed, fit(folder, every_steps=1000))


def test_a_signal_ends_a_fit_in_whose_callbacks_another_one_was_saved(tmp_path: Path) -> None:
    def begin(epoch: int, logs: Any = None) -> None:
        if not checkpoints(tmp_path / "inner"):
            (x, y), inner = data(BATCH), phalanx.callbacks.Checkpoint(tmp_path / "inner", every_steps=1)
            others.model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[inner])
            os.kill(os.getpid(), signal.SIGTERM)

    others = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
    with pytest.raises(PreemptedError, match="after 1 steps"):
        fit(tmp_path / "outer", others)


def test_the_ledger_can_be_read(tmp_path: Path) -> None:
    fit(tmp_path)
    content = json.loads((tmp_path / "fit0-ledger.json").read_text())
    assert content["samples"] == SAMPLES
    assert content["epochs"]["3"] == {"samples used so often": {"1": SAMPLES}, "runs": [[0, SAMPLES - 1, 1]]}


def test_a_ledger_that_cannot_be_written_is_written_with_the_next_checkpoint(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, failures = checkpointing.write_ledger, [OSError("No space left on device")]

    def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        write(*arguments)

    monkeypatch.setattr(checkpointing, "write_ledger", fail_once)
    with pytest.raises(Broken):
        fit(tmp_path, BreakOff(STEPS + 9))  # two checkpoints after the end of the first epoch
    assert json.loads((tmp_path / "fit0-ledger.json").read_text())["epochs"].keys() == {"0"}


@pytest.mark.parametrize("wrong", [{"every_steps": 0}, {"every_seconds": -1.0}, {"keep": 0}, {"directory": ""}])
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        phalanx.callbacks.Checkpoint(**{"directory": tmp_path, **wrong})


def test_without_a_checkpoint_keras_trains_by_itself() -> None:
    made = model()
    made.fit(*data(), verbose=0)
    assert "_phalanx_trainer" not in vars(made)
