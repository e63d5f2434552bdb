"""What workers among parameter servers must have in common: `python -m tests.parameter_server.alike_program FOLDER`.

Each worker writes what it found to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

FEATURES = 8
STOPS_AFTER = 2


def main() -> None:
    import keras
    import numpy as np

    import phalanx

    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    strategy = phalanx.ParameterServerStrategy()
    chief = strategy.is_chief
    found["split"] = np.random.permutation(100).tolist()  # without a seed
    x = np.random.default_rng(0).normal(size=(330, FEATURES)).astype("float32")

    def build(units: int) -> Any:
        dropout, norm = keras.layers.Dropout(0.5), keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(units), norm, dropout])
        model.add(keras.layers.Dense(1))
        model.layers[0].trainable = False
        if chief:  # as after loading what was trained elsewhere
            model.layers[0].set_weights([np.ones((FEATURES, units)), np.zeros(units)])
            norm.moving_mean.assign(np.full(units, 3.0))
        model.compile("sgd", "mse")
        return model

    for mode, options in (("asynchronous", {}), ("synchronous", {"synchronous": True})):
        strategy = phalanx.ParameterServerStrategy(**options)
        with strategy.scope():
            model = build(4)
        epochs: list[int] = []

        def begin(epoch: int, logs: Any, mode: str = mode, rank: int = strategy.rank) -> None:
            (folder / f"{mode}.{rank}").touch()

        def end(epoch: int, logs: Any, model: Any = model, epochs: list[int] = epochs, mode: str = mode) -> None:
            epochs.append(epoch)
            while not (folder / f"{mode}.1").exists():
                time.sleep(0.02)
            model.stop_training = epoch == STOPS_AFTER

        stop = keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)
        model.fit(x, x[:, :1], batch_size=32, epochs=50, verbose=0, callbacks=[stop])
        found[mode] = {
            "frozen": model.layers[0].get_weights()[0].tolist(),
            "seed": keras.ops.convert_to_numpy(model.layers[2].seed_generator.state.value).tolist(),
            "epochs": epochs,
        }

    # A worker that is late: the chief has finished a fit and begun another one, of another model.
    strategy = phalanx.ParameterServerStrategy()
    for units in (5, 6):
        with strategy.scope():
            model = build(units)
        if not chief and units == 5:
            while not (folder / "second").exists():
                time.sleep(0.02)

        def batch(batch: int, logs: Any, model: Any = model, units: int = units) -> None:
            if units == 6:
                (folder / ("second" if chief else "joined")).touch()
                model.stop_training = chief and (folder / "joined").exists()

        model.fit(
            x,
            x[:, :1],
            batch_size=32,
            epochs=1 if units == 5 else 10**6,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=batch)],
        )
    (folder / f"{strategy.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
