"""Callbacks: the same logs everywhere, joint decisions, and only the chief writes and prints."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import keras
import numpy as np
import pytest
from keras import callbacks, ops

from phalanx.callbacks import OnChief
from phalanx.errors import ConfigurationError
from phalanx.storage.files import list_names
from phalanx.storage.remote_path import RemotePath
from phalanx.training.callback_hooks import has_batch_hooks
from phalanx.tuning import call_on_chief
from tests.support.seeds import set_random_seed
from tests.training.scenarios.common import CLASSES, SAMPLES, compiled, features, fitted, labels, regressor
from tests.training.scenarios.registry import BACKENDS, ONE_BACKEND, Setting, scenario


class Record(callbacks.Callback):
    """Records every log that callbacks of this rank see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def _note(self, hook: str, index: Any, logs: Any) -> None:
        self.seen.append((hook, index, {name: float(value) for name, value in (logs or {}).items()}))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("batch", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("test", batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._note("epoch", epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._note("end", 0, logs)


@scenario()
def logs_at_every_batch(setting: Setting) -> dict[str, Any]:
    record = Record()
    model = compiled(setting, metrics=["accuracy"])
    found = fitted(model, callbacks=[record], validation_data=(features(9, seed=1), labels(9, seed=1)))
    return found | {"seen": record.seen}


@scenario(quick=ONE_BACKEND)
def early_stopping_restores_the_best(setting: Setting) -> dict[str, Any]:
    stop = callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True)
    model = compiled(setting, optimizer=keras.optimizers.SGD(2.5))
    found = fitted(model, callbacks=[stop], epochs=12, validation_data=(features(9, seed=1), labels(9, seed=1)))
    return found | {"stopped": stop.stopped_epoch, "best": stop.best_epoch}


@scenario()
def learning_rate_callbacks(setting: Setting) -> dict[str, Any]:
    """The logs contain the rate after the plateau and the schedule have set it."""
    model = compiled(setting, optimizer=keras.optimizers.SGD(3.0))
    plateau = callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=0.05)
    first = fitted(model, callbacks=[plateau], epochs=6)
    schedule = callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.5 if epoch else 1.0))
    second = fitted(model, callbacks=[schedule], epochs=3)
    return {"plateau": first, "schedule": second}


@scenario()
def learning_rate_set_at_batches(setting: Setting) -> dict[str, Any]:
    class Triangle(callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (1 + batch)

    return fitted(compiled(setting), callbacks=[Triangle()])


@scenario(quick=ONE_BACKEND)
def learning_rate_set_at_batches_by_the_chief_alone(setting: Setting) -> dict[str, Any]:
    """Decisions of the chief apply to all ranks."""

    class Halve(callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if setting.rank == 0:
                self.model.optimizer.learning_rate = 0.2 / (1 + batch)

    return fitted(compiled(setting), callbacks=[Halve()])


@scenario(quick=ONE_BACKEND)
def learning_rate_set_by_the_chief_alone_under_loss_scaling(setting: Setting) -> dict[str, Any]:
    class Halve(callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if setting.rank == 0:
                self.model.optimizer.learning_rate = 0.2 / (2 + epoch)

    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.2), initial_scale=64.0)
    return fitted(compiled(setting, optimizer=optimizer), callbacks=[Halve()])


@scenario(plain=False)
def callbacks_that_only_the_chief_has(setting: Setting) -> dict[str, Any]:
    """One of them ends the training on all ranks."""

    class Stop(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1

    return fitted(compiled(setting), callbacks=[Stop()] if setting.rank == 0 else [])


@scenario(plain=False)
def validation_without_data_says_nothing(setting: Setting) -> dict[str, Any]:
    def once() -> Any:
        yield features(9), labels(9)

    found = fitted(compiled(setting), validation_data=once(), epochs=3)
    losses = found["history"].get("val_loss", [])
    assert losses
    assert 0.0 not in losses, losses
    return found


@scenario(quick=ONE_BACKEND)
def terminate_on_nan(setting: Setting) -> dict[str, Any]:
    """It stops after the batch, with and without callbacks of the program."""
    x = features()
    x[20] = np.nan
    seen, record = [], Record()
    for others in ([], [record]):
        model = compiled(setting)
        stopping = [callbacks.TerminateOnNaN(), *others]
        model.fit(x, labels(), batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=stopping)
        seen.append(int(ops.convert_to_numpy(model.optimizer.iterations)))
    return {"steps": seen, "hooks": [entry[:2] for entry in record.seen]}


@scenario(quick=ONE_BACKEND)
def terminate_on_nan_by_an_error(setting: Setting) -> dict[str, Any]:
    """The program catches the error on all ranks and continues training with good data."""
    x, caught = features(), []
    x[20] = np.nan
    model = compiled(setting)
    before = model.get_weights()
    if not hasattr(stop := callbacks.TerminateOnNaN(), "raise_error"):  # older versions of Keras
        return {}
    stop.raise_error = True
    try:
        model.fit(x, labels(), batch_size=8, shuffle=False, verbose=0, callbacks=[stop])
    except RuntimeError as error:
        caught.append(str(error))
    model.set_weights(before)
    return {"caught": len(caught), "text": caught, **fitted(model)}


@scenario(quick=ONE_BACKEND)
def one_rank_stops_all(setting: Setting) -> dict[str, Any]:
    """Only the last rank requests the end, after batch 1 of epoch 1."""

    class Stop(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.epoch == 1 and batch == 1 and setting.rank == setting.world_size - 1:
                self.model.stop_training = True

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

    record = Record()
    found = fitted(compiled(setting), callbacks=[Stop(), record], epochs=5)
    return found | {"seen": record.seen}


@scenario()
def one_rank_stops_all_at_the_end_of_an_epoch(setting: Setting) -> dict[str, Any]:
    class Stop(callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and setting.rank == setting.world_size - 1:
                self.model.stop_training = True

    return fitted(compiled(setting), callbacks=[Stop()], epochs=5)


@scenario()
def stopped_before_the_first_step(setting: Setting) -> dict[str, Any]:
    """Stopped by the last rank alone, at the beginning of an epoch and of the training: one more step is taken."""

    def stop(*now: Any) -> None:
        model.stop_training = now[0] in (1, {}, None) and setting.rank == setting.world_size - 1

    model = compiled(setting)
    between = fitted(model, callbacks=[callbacks.LambdaCallback(on_epoch_begin=stop)], epochs=3)
    at_once = fitted(model, callbacks=[callbacks.LambdaCallback(on_train_begin=stop)], epochs=3)
    steps = int(model.optimizer.iterations)
    return {"between": between, "at once": at_once, "steps": steps}


@scenario(backends=("jax", "tensorflow"), quick=ONE_BACKEND)
def stopped_in_an_incomplete_group(setting: Setting) -> dict[str, Any]:
    """Stopped by the last rank alone, after the last of five steps in groups of three: all stop at the end of the
    epoch."""
    seen: list[bool] = []

    class Stop(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5 and setting.rank == setting.world_size - 1:
                self.model.stop_training = True

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(bool(self.model.stop_training))

    found = fitted(compiled(setting, steps_per_execution=3), batch_size=7, callbacks=[Stop()], epochs=3)
    return found | {"seen": seen}


@scenario()
def outputs_seen_by_callbacks(setting: Setting) -> dict[str, Any]:
    """They include all replicas and all batches of an execution."""
    seen: list[Any] = []
    look = callbacks.LambdaCallback()
    look.on_predict_batch_end = lambda batch, logs: seen.append(  # type: ignore[method-assign]
        (batch, np.array(keras.ops.convert_to_numpy(logs["outputs"])))
    )
    model = compiled(setting, steps_per_execution=1 if setting.backend == "torch" else 2)
    whole = model.predict(features(), batch_size=8, verbose=0, callbacks=[look])
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in seen]), whole)
    return {"seen": seen, "whole": whole}


@scenario()
def evaluation_stopped_by_a_callback(setting: Setting) -> dict[str, Any]:
    class Stop(callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and setting.rank == setting.world_size - 1:
                self.model.stop_evaluating = True

    model = compiled(setting, metrics=["accuracy"])
    return {"logs": model.evaluate(features(), labels(), batch_size=8, callbacks=[Stop()], verbose=0, return_dict=True)}


@scenario(quick=ONE_BACKEND)
def stopped_before_the_first_batch(setting: Setting) -> dict[str, Any]:
    """The last rank alone stops an evaluation and a prediction: one batch is computed."""

    class Stop(callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            self.model.stop_evaluating = setting.rank == setting.world_size - 1

        def on_predict_begin(self, logs: Any = None) -> None:
            self.model.stop_predicting = setting.rank == setting.world_size - 1

    model = compiled(setting, metrics=["accuracy"])
    options = {"batch_size": 8, "callbacks": [Stop()], "verbose": 0}
    logs = model.evaluate(features(), labels(), return_dict=True, **options)
    return {"logs": logs, "outputs": model.predict(features(), **options)}


@scenario(plain=False, quick=ONE_BACKEND)
def what_the_chief_alone_evaluates_leaves_the_logs_as_they_are(setting: Setting) -> dict[str, Any]:
    """Even in the middle of an epoch, logs and metrics continue as if nothing had been evaluated."""

    class Evaluate(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.evaluate(features(9), labels(9), verbose=0)
            self.model.test_on_batch(features(9), labels(9))

    found = []
    for chosen in ([OnChief(Evaluate())], []):
        set_random_seed(1)
        found.append(fitted(compiled(setting, metrics=["accuracy"]), callbacks=chosen)["history"])
    assert found[0] == found[1]
    return {"history": found}


@scenario(quick=ONE_BACKEND)
def only_the_chief_writes(setting: Setting) -> dict[str, Any]:
    """Each rank names its own files. Only those of the chief appear."""
    folder = setting.folder
    model = compiled(setting, metrics=["accuracy"])
    fitted(
        model,
        callbacks=[
            callbacks.ModelCheckpoint(folder / "best.keras", monitor="loss", save_best_only=True),
            callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
            callbacks.CSVLogger(folder / "log.csv"),
            callbacks.BackupAndRestore(folder / "backup"),
        ],
    )
    setting.gather(b"all have finished")
    written = sorted(path.name for path in folder.rglob("[!.]*") if path.is_file())
    assert setting.rank == 0 or written == [], written
    return {"own_written": written, "weights": model.get_weights()}


@scenario(quick=ONE_BACKEND)
def the_chief_writes_to_a_store(setting: Setting) -> dict[str, Any]:
    """Each rank has its own `memory://`. The chief resumes from what it has written there."""
    run = f"memory://the_chief_writes_to_a_store/{setting.rank}"
    backup = callbacks.BackupAndRestore(f"{run}/backup", delete_checkpoint=False)
    saved = callbacks.ModelCheckpoint(f"{run}/{{epoch}}.weights.h5", save_weights_only=True)
    fitted(compiled(setting), callbacks=[saved, backup, callbacks.CSVLogger(f"{run}/log.csv")])
    found = fitted(compiled(setting), callbacks=[callbacks.BackupAndRestore(f"{run}/backup")], epochs=3)
    written = sorted(list_names(RemotePath(run)))
    shown = [name for name in written if not name.startswith(".")]
    assert shown == (["1.weights.h5", "2.weights.h5", "log.csv"] if setting.rank == 0 else []), written
    assert setting.world_size == 1 or setting.rank or ".backup.owner" in written, "claimed"
    return found


@scenario()
def callbacks_derived_from_the_chiefs(setting: Setting) -> dict[str, Any]:
    """They see batches, set the learning rate, add to the logs and end the training, all with effect on all ranks."""

    class Log(callbacks.CSVLogger):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.05 * (batch + 1)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = self.epoch == 1 and batch == 1

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["rate"] = float(self.model.optimizer.learning_rate)
            super().on_epoch_end(epoch, logs)

    return fitted(compiled(setting), callbacks=[Log(setting.shared / f"{setting.world_size}.csv")], epochs=3)


class Predicting(Record):
    """Makes decisions by predictions, and ends the training within an epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        assert self.model.predict(features(), verbose=0).shape == (SAMPLES, CLASSES)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self.model.stop_training = self.epoch == 1 and batch == 1


@scenario()
def callbacks_wrapped_in_on_chief(setting: Setting) -> dict[str, Any]:
    """Only the chief runs them and calls the function that creates one. Their decisions apply to all ranks."""
    wrapped, created = Record(), []

    def create() -> Any:
        created.append(Predicting())
        return created[-1]

    on_chief = [OnChief(wrapped), OnChief(create)]
    found = fitted(compiled(setting), callbacks=on_chief, epochs=3)
    fitted(compiled(setting), callbacks=on_chief[1:], epochs=1)
    chief = setting.rank == 0
    assert len(created) == chief, "it is created once, on the chief"
    assert bool(wrapped.seen) == chief
    return found | {"own_seen": [wrapped.seen, [each.seen for each in created]]}


@scenario(quick=ONE_BACKEND)
def rates_inside_a_multi_optimizer_are_the_chiefs(setting: Setting) -> dict[str, Any]:
    """As for a single optimizer, if a callback sets the rate only on the chief."""
    inner = keras.optimizers.SGD(0.2)
    optimizers = keras.optimizers.OptimizerMap(inner, {".*bias": keras.optimizers.Adam(0.01)})

    class Lower(callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            inner.learning_rate = 0.2 / (1 + epoch)

    model = compiled(setting, optimizer=keras.optimizers.MultiOptimizer(optimizers))
    return fitted(model, callbacks=[OnChief(Lower())])


@scenario(plain=False, quick=ONE_BACKEND)
def known_loggers_run_on_the_chief(setting: Setting) -> dict[str, Any]:
    """They are recognized by the package of their class. They cause no agreement of the ranks after each batch."""

    class Logger(Record):
        __module__ = "wandb.integration.keras.callbacks.metrics_logger"

    class Derived(Logger):
        __module__ = __name__

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.predict(features(), verbose=0)
            super().on_epoch_end(epoch, logs)

    loggers = [Logger(), Derived()]
    assert not has_batch_hooks(loggers, "train")
    fitted(compiled(setting), callbacks=loggers)
    assert [bool(logger.seen) for logger in loggers] == [setting.rank == 0] * 2
    return {}


@scenario(plain=False, quick=ONE_BACKEND)
def what_the_chief_asks_for_all_receive(setting: Setting) -> dict[str, Any]:
    """All receive its result or its failure: a hyperparameter search must not continue without the others."""

    def fail() -> None:
        raise KeyError("units")

    found = call_on_chief(lambda: {"asked by": setting.rank, "units": [8, None, "relu"]}, setting.strategy)
    assert found["asked by"] == 0
    with pytest.raises(KeyError if setting.rank == 0 else ConfigurationError, match="units"):
        call_on_chief(fail, setting.strategy)
    return {"found": found, "pruned": call_on_chief(lambda: np.bool_(True), setting.strategy)}


@scenario()
def csv_log_of_the_chief(setting: Setting) -> dict[str, Any]:
    path = setting.shared / "log.csv"
    fitted(compiled(setting, metrics=["accuracy"]), callbacks=[callbacks.CSVLogger(path)])
    setting.gather(b"written")
    header, *rows = path.read_text().splitlines()
    return {"header": header, "rows": [[float(cell) for cell in row.split(",") if cell != "NA"] for row in rows]}


@scenario(needs=("tensorflow", "tensorboard"))
def tensorboard_of_the_chief(setting: Setting) -> dict[str, Any]:
    folder = setting.folder / "board"
    fitted(compiled(setting), callbacks=[callbacks.TensorBoard(folder, write_graph=False)])
    assert folder.exists() == (setting.rank == 0)
    return {}


@scenario(quick=ONE_BACKEND)
def backup_resumes_exactly(setting: Setting) -> dict[str, Any]:
    """Interrupted after two of four epochs and resumed in a new model, with the same results as without
    interruption."""

    class Break(callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise InterruptedError

    backup = setting.shared / "backup"
    model = compiled(setting, optimizer=keras.optimizers.Adam(0.02))
    with contextlib.suppress(InterruptedError):
        fitted(model, callbacks=[callbacks.BackupAndRestore(backup), Break()], epochs=4)
    set_random_seed(99)
    again = compiled(setting, optimizer=keras.optimizers.Adam(0.02))
    found = fitted(again, callbacks=[callbacks.BackupAndRestore(backup)], epochs=4)
    set_random_seed(1)
    whole = fitted(compiled(setting, optimizer=keras.optimizers.Adam(0.02)), epochs=4)
    for resumed, straight in zip(found["weights"], whole["weights"], strict=True):
        np.testing.assert_allclose(resumed, straight, atol=1e-6)
    return found


@scenario()
def checkpoint_is_loaded_by_all(setting: Setting) -> dict[str, Any]:
    path = setting.shared / "model.keras"
    model = compiled(setting, optimizer=keras.optimizers.Adam(0.02))
    first = fitted(model, callbacks=[callbacks.ModelCheckpoint(path)])
    setting.gather(b"written")
    with setting.scope():
        loaded = keras.saving.load_model(path)
    for left, right in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)
    return {"first": first, "second": fitted(loaded)}


@scenario(plain=False, quick=ONE_BACKEND)
def non_chiefs_print_nothing(setting: Setting) -> dict[str, Any]:
    printed = io.StringIO()
    stop = callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=10.0, verbose=1)
    with contextlib.redirect_stdout(printed):
        model = compiled(setting, metrics=["accuracy"])
        fitted(model, verbose=1, epochs=4, callbacks=[stop], validation_data=(features(9, seed=1), labels(9, seed=1)))
        model.evaluate(features(), labels(), verbose=1)
        model.predict(features(), verbose=1)
    text = printed.getvalue()
    if setting.rank:
        assert text == "", text
    else:
        assert "Epoch 1/4" in text, text
        for part in ("accuracy", "val_loss", f"{setting.world_size} replicas", "samples/s", "early stopping"):
            assert part in text, f"{part} is not in {text}"
    return {}


@scenario(plain=False)
def two_lines_per_epoch(setting: Setting) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        fitted(compiled(setting), verbose=2)
    assert (printed.getvalue() == "") == (setting.rank > 0)
    return {}


@scenario()
def weights_read_and_changed_at_batches(setting: Setting) -> dict[str, Any]:
    """A callback that clips the weights after each step, equally on every rank."""

    class Clip(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kernel = self.model.layers[0].kernel
            kernel.assign(keras.ops.clip(kernel, -0.2, 0.2))

    return fitted(compiled(setting, regressor, loss="mse"), y=features()[:, :1], callbacks=[Clip()])


@scenario()
def swap_ema_weights(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.8))
    return fitted(
        model,
        callbacks=[callbacks.SwapEMAWeights(swap_on_epoch=True)],
        validation_data=(features(9, seed=1), labels(9, seed=1)),
    )


@scenario()
def lambda_callback(setting: Setting) -> dict[str, Any]:
    seen: list[Any] = []
    hook = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, float(logs["loss"]))))
    # Keras runs hooks of a callback outside a list in a thread pool, in any order on a loaded machine.
    return fitted(compiled(setting), callbacks=hook) | {"seen": sorted(seen)}


@scenario(plain=False)
def a_checkpoint_of_ones_own_may_predict(setting: Setting) -> dict[str, Any]:
    """It writes files, so only the chief runs it, and its predictions are computed by the chief alone."""
    x, y = features(), labels()

    class Judged(callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.on_train_batch_end(0)  # another of its own hooks
            right = self.model.predict(x, verbose=0).argmax(1) == y
            self.model.evaluate(x, y, verbose=0)
            super().on_epoch_end(epoch, {**(logs or {}), "right": float(right.mean())})

    saved = Judged(
        setting.shared / "best.weights.h5", monitor="right", mode="max", save_weights_only=True, save_best_only=True
    )
    fitted(compiled(setting), callbacks=[saved])
    setting.gather(b"")
    assert (setting.shared / "best.weights.h5").exists()
    assert not [name for name in vars(saved) if name.startswith("on_")], "it is again as it was"
    return {}


@scenario(plain=False)
def all_ranks_may_save_the_same_file_and_read_it(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    fitted(model)
    found = []
    for number in range(10):
        model.save(setting.shared / "model.keras")
        model.save_weights(setting.shared / "model.weights.h5")
        found += keras.saving.load_model(setting.shared / "model.keras").get_weights()
        model.load_weights(setting.shared / "model.weights.h5")
        assert number < 10
    setting.gather(b"")
    assert sorted(path.name for path in setting.shared.glob("*model*")) == ["model.keras", "model.weights.h5"]
    return {"weights": found}


@scenario()
def saved_between_two_updates(setting: Setting) -> dict[str, Any]:
    """The file also contains what the optimizer has accumulated. Only the chief has the callback."""
    path = setting.shared / "middle.keras"
    model = compiled(setting, optimizer=keras.optimizers.SGD(0.2, gradient_accumulation_steps=3))
    saver = [callbacks.ModelCheckpoint(path, save_freq=2)] if setting.rank == 0 else []
    model.fit(features(), labels(), batch_size=16, shuffle=False, verbose=0, callbacks=saver)
    setting.gather(b"written")
    saved = keras.models.load_model(path)
    return {"optimizer": [keras.ops.convert_to_numpy(variable) for variable in saved.optimizer.variables]}


@scenario(quick=BACKENDS)
def saved_by_a_custom_callback_between_two_updates(setting: Setting) -> dict[str, Any]:
    path = setting.shared / "middle.keras"
    model = compiled(setting, optimizer=keras.optimizers.SGD(0.2, gradient_accumulation_steps=4))
    seen = []

    class Saver(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append([np.array(keras.ops.convert_to_numpy(v.value)) for v in self.model.optimizer.variables])
            if batch == 2:
                self.model.save(path)

    model.fit(features(), labels(), batch_size=16, shuffle=False, verbose=0, callbacks=[Saver()])
    setting.gather(b"written")
    saved = keras.models.load_model(path)
    return {"seen": seen, "optimizer": [keras.ops.convert_to_numpy(variable) for variable in saved.optimizer.variables]}


@scenario(plain=False)
def the_way_of_dividing_is_told_whenever_it_is_another(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    told = []
    for verbose, data in (
        (0, (features(), labels())),
        (2, (features(), labels())),
        (2, (features(), labels())),
        (2, ((part for part in [(features(8), labels(8))]),)),
    ):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            model.fit(*data, verbose=verbose)
        told.append(printed.getvalue().count("Input sharding: DATA"))
    assert told == ([0, 1, 0, 1] if setting.rank == 0 else [0, 0, 0, 0]), told
    return {}
