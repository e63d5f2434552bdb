"""Programs for jobs that train a table by rows: `python -m tests.parameter_server.embedding_traffic FOLDER WHAT...`

WHAT is "asynchronous" or "synchronous": train for a while, and write how far it came; or heights of tables: train one
after the other, and write the bytes that a step of each took.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.support.seeds import set_random_seed

SAMPLES, BATCH, EPOCHS = 4096, 64, 12


def make_model(keras: Any, height: int) -> Any:
    set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(height, 32),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def main() -> None:
    import keras
    import numpy as np

    import phalanx

    folder, what = Path(sys.argv[1]), sys.argv[2:]
    numbers = np.random.default_rng(0).integers(0, 10_000, (SAMPLES, 1)).astype("int32")
    targets = np.sin(numbers).astype("float32")

    if what[0].isdigit():
        strategy = phalanx.ParameterServerStrategy()
        for height in map(int, what):
            taken: list[tuple[int, int]] = []

            def note(batch: int, logs: object, taken: list[tuple[int, int]] = taken) -> None:
                taken.append((strategy.bytes_sent, strategy.bytes_received))

            with strategy.scope():
                model = make_model(keras, height)
            callback = keras.callbacks.LambdaCallback(on_train_batch_begin=note)
            model.fit(numbers, targets, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[callback])
            sent, received = np.diff(np.array(taken), axis=0).mean(axis=0)
            with open(folder / "traffic", "a") as file:
                file.write(f"{height} {sent} {received}\n")
        return

    strategy = phalanx.ParameterServerStrategy(synchronous=what[0] == "synchronous")
    with strategy.scope():
        model = make_model(keras, 20_000)

    def end_of_epoch(epoch: int, logs: object) -> None:
        (folder / f"{strategy.rank}.epoch").write_text(str(epoch))

    noted = keras.callbacks.LambdaCallback(on_epoch_end=end_of_epoch)
    model.fit(numbers, targets, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[noted])
    finite = all(np.isfinite(weight).all() for weight in model.get_weights())
    (folder / f"{strategy.rank}.end").write_text(f"{strategy.global_step} {finite}")


if __name__ == "__main__":
    main()
