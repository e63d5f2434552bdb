"""The chief's program, which calls `fit`; the other tasks serve: `python -m tests.coordinator.fit_program FOLDER KIND`.

It writes what it found to FOLDER/found.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from tests.coordinator.serving import serve_if_asked
from tests.support.seeds import set_random_seed

FEATURES = 4
BOUND_S = 200.0
FOLDER, KIND = Path(sys.argv[1]), sys.argv[2]


def until(condition: Any, what: str) -> None:
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


class Scale(keras.layers.Layer):
    """A layer that Keras cannot describe: its argument is an array."""

    def __init__(self, factors: Any) -> None:
        super().__init__()
        self.factors = factors
        self.inner = keras.layers.Dense(FEATURES)

    def call(self, x: Any) -> Any:
        return self.inner(keras.ops.multiply(x, self.factors))


class Net(keras.Model):
    """A model of the program's own, which is built by its first batch."""

    def __init__(self, head: keras.layers.Layer) -> None:
        super().__init__()
        self.scale = Scale(np.linspace(0.5, 1.5, FEATURES, dtype="float32"))
        self.normalize = keras.layers.LayerNormalization()
        self.head = head

    def call(self, x: Any) -> Any:
        return self.head(self.normalize(self.scale(x)))


class Trace(keras.callbacks.Callback):
    """Runs on every worker, and says so. In the kind `pauses` each waits after its first batch until it is released; in
    the kind `fails`, until another one takes part."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        trained = FOLDER / f"trained-{os.getpid()}"
        is_first = not trained.exists()  # `batch` counts those of all workers
        trained.touch()
        if KIND == "pauses" and is_first:
            until((FOLDER / "go").exists, "training was not released")
        if KIND == "fails":
            until(lambda: len(list(FOLDER.glob("trained-*"))) > 1, "no worker took part")


def model() -> keras.Model:
    set_random_seed(7)
    net = Net(keras.layers.Dense(1))
    net.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return net


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    x = random.normal(size=(256, FEATURES)).astype("float32")  # enough batches that each worker gets some
    return x, x.sum(axis=1, keepdims=True)


def fitted(net: keras.Model, **arguments: Any) -> dict[str, Any]:
    x, y = data()
    history = net.fit(x, y, batch_size=16, shuffle=False, verbose=0, **arguments)
    evaluated = net.evaluate(x, y, verbose=0)
    return {"history": history.history, "weights": net.get_weights(), "evaluated": evaluated}


def main() -> None:
    serve_if_asked()
    strategy = phalanx.ParameterServerStrategy(synchronous=KIND == "synchronous")
    with strategy.scope():
        net = model()
    found: dict[str, Any] = {}
    if KIND == "synchronous":
        found["job"] = fitted(net, epochs=2, callbacks=[Trace()])
        net.compile("sgd", "mse", metrics=["mae"])  # another optimizer for the copies too
        found["again"] = fitted(net, epochs=1)
        alone = model()
        found["plain"] = fitted(alone, epochs=2)
        alone.compile("sgd", "mse", metrics=["mae"])
        found["plain again"] = fitted(alone, epochs=1)
    elif KIND == "fails":
        fitted(net, callbacks=[Trace()])
        try:
            net.fit((batch for batch in [data()]), steps_per_epoch=1, epochs=1, verbose=0)
        except phalanx.UnsupportedError as error:
            found["generator"] = str(error)
        try:
            fitted(net, callbacks=[Fails()], epochs=2)
        except ZeroDivisionError as error:
            found["error"] = str(error), str(error.__cause__)
    else:
        found["job"] = fitted(net, epochs=4, callbacks=[Trace()])
    (FOLDER / "found").write_bytes(pickle.dumps(found))


class Fails(keras.callbacks.Callback):
    """Raises an error on the workers that serve."""

    def __init__(self) -> None:
        super().__init__()
        self.chief = os.getpid()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if os.getpid() == self.chief:
            until((FOLDER / "failing").exists, "no worker took part")
            return
        (FOLDER / "failing").touch()
        raise ZeroDivisionError("on a worker")


if __name__ == "__main__":
    main()
