"""A program for jobs that are disturbed: `python -m tests.parameter_server.program FOLDER KIND EPOCHS`.

It ends after so many epochs, or after the one in which a task makes FOLDER/enough.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.support.seeds import set_random_seed


def main() -> None:
    import keras
    import numpy as np

    import phalanx
    from phalanx.training import model_dispatch
    from phalanx.training.steps.parameter_server_step import ParameterServerMerge

    folder, kind, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if kind == "explicit server":
        config = json.loads(os.environ["TF_CONFIG"])
        if config["task"]["type"] == "ps":
            phalanx.Server(config["cluster"], job_name="ps", task_index=config["task"]["index"]).join()
    strategy = phalanx.ParameterServerStrategy(
        synchronous=kind in ("synchronous", "other metrics", "first", "late chief"),
        replicas_to_aggregate=1 if kind in ("first", "late chief") else None,
        staleness=2 if kind == "bounded" else None,
        overlap=kind in ("bounded", "overlapped"),
        refuse_nan=kind != "let through",
        snapshot_dir=os.environ.get("SNAPSHOT_DIR"),
        snapshot_seconds=0.2,
        replication=int(os.environ.get("REPLICATION", "1")),
    )
    width = 9 if kind == "other model" and strategy.rank == 1 else 8
    set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(width, "tanh"), keras.layers.Dense(1)])
        if kind == "spectral":
            model.add(keras.layers.SpectralNormalization(keras.layers.Dense(1)))
        if kind in ("synchronized", "synchronized and frozen", "first"):
            model.add(keras.layers.BatchNormalization())
            model.layers[-1].synchronized = True  # as an argument Keras takes it on TensorFlow alone
        model.trainable = kind != "frozen"
        model.layers[-1].trainable &= kind != "synchronized and frozen"
        optimizer = keras.optimizers.SGD(0.001) if kind.startswith("momentum") else keras.optimizers.Adam(0.001)
        model.compile(optimizer, "mse", metrics=["mae"] if kind == "other metrics" and strategy.rank == 1 else [])
    x = np.random.default_rng(0).normal(size=(1024, 8)).astype("float32")
    y = x[:, :1] + np.random.default_rng(1).normal(size=(1024, 1)).astype("float32")
    if kind == "other data":
        x += strategy.rank
    shuffles = kind not in ("not finite", "let through")
    if not shuffles:
        y[32:48] = np.nan  # batch 2 of each epoch

    def end_of_epoch(epoch: int, logs: dict[str, float]) -> None:
        if kind == "validates":
            assert logs["val_loss"] > 0
        writing = folder / f"{strategy.rank}.epoch.part"
        writing.write_text(str(epoch))
        writing.replace(folder / f"{strategy.rank}.epoch")  # a reader that sees it can read it
        model.stop_training = (folder / "enough").exists()

    def grow(epoch: int, logs: object) -> None:
        if strategy.rank:
            assert int(model.optimizer.iterations) == strategy.global_step
        if kind == "momentum" and epoch == 1:
            model.optimizer.momentum = 0.5
        if kind == "schedule" and epoch == 1:
            model.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        if kind == "grows" and epoch == 1:
            model.layers[0].enable_lora(1)  # makes variables

    if kind == "late worker" and strategy.rank == 1:
        (folder / "waits").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)

    stopping = 1 if kind == "stops with a ticket" else 0

    def stop(batch: int, logs: object) -> None:
        if strategy.rank == stopping and (folder / "0.epoch").exists() and not (folder / "stopped").exists():
            (folder / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    def ask(batch: int, logs: object) -> None:
        if strategy.rank == 1 and not (folder / "asked").exists():
            model_dispatch.request_stop(model)
            (folder / "asked").touch()
            while not (folder / "go").exists():  # with a step in hand, without which the epoch does not end
                time.sleep(0.05)

    if kind == "late chief" and strategy.rank == 0:
        next_ticket = ParameterServerMerge.next_ticket

        def late(merge: ParameterServerMerge, fit: int, epoch: int) -> object:
            others = folder / "1.epoch"
            while epoch == epochs - 1 and not (others.exists() and others.read_text() == str(epoch)):
                time.sleep(0.05)
            return next_ticket(merge, fit, epoch)

        ParameterServerMerge.next_ticket = late  # type: ignore[assignment, method-assign]

    def validate(logs: object) -> None:
        (folder / "validates").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)

    noted = keras.callbacks.LambdaCallback(on_epoch_begin=grow, on_epoch_end=end_of_epoch)
    if kind == "asks to stop":
        noted.on_train_batch_begin = ask
    if kind == "momentum in an epoch":
        noted.on_train_batch_end = lambda batch, logs: setattr(model.optimizer, "momentum", 0.5)
    if kind == "chief stops":
        noted.on_train_batch_begin = stop  # with a step in hand
    if kind == "stops with a ticket":
        noted.on_train_batch_end = stop  # of the next step
    if kind == "validates":
        noted.on_test_begin = validate
    validation = (x[:64], y[:64]) if kind == "validates" else None
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=epochs,
        verbose=0,
        shuffle=shuffles,
        callbacks=[noted],
        validation_data=validation,
    )
    if kind == "stops with a ticket":
        assert int(model.optimizer.iterations) == strategy.global_step
    np.savez(folder / f"{strategy.rank}.weights.npz", *model.get_weights())
    finite = all(np.isfinite(weight).all() for weight in model.get_weights())
    (folder / f"{strategy.rank}.history").write_text(json.dumps({"epoch": history.epoch, **history.history}))
    (folder / f"{strategy.rank}.end").write_text(f"{strategy.global_step} {finite}")


if __name__ == "__main__":
    main()
