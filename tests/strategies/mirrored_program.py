"""A program as guides have it: `python mirrored_program.py plain|mirrored|central OUT`; see its environment, too."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import keras
import numpy as np

import phalanx
from tests.support.seeds import set_random_seed


def main(kind: str, out: Path) -> None:
    strategy: phalanx.Strategy | None = None
    if kind == "central":
        strategy = phalanx.CentralStorageStrategy(json.loads(os.environ["DEVICES"]))
    elif kind != "plain":
        strategy = phalanx.MirroredStrategy(
            devices=json.loads(os.environ["DEVICES"]), cross_device_ops=eval(os.environ.get("OPS", "None"))
        )
    set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 6)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int32")
    with strategy.scope() if strategy else nullcontext():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    found = {
        "history": history,
        "evaluated": model.evaluate(x, y, batch_size=16, verbose=0),
        "predicted": model.predict(x, batch_size=16, verbose=0).tolist(),
        "weights": [weight.tolist() for weight in model.get_weights()],
    }
    replicas = 1
    if strategy is not None:
        replicas = strategy.num_replicas_in_sync
        parts = strategy.experimental_distribute_dataset((x[:n],) for n in (11,))
        sums = [strategy.reduce("SUM", strategy.run(lambda part: keras.ops.sum(part), args=part)) for part in parts]
        np.testing.assert_allclose([float(each) for each in sums], [x[:11].sum()], rtol=1e-4)
    if strategy is None or strategy.rank == 0:
        out.write_text(json.dumps(found))
        print("replicas", replicas)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
