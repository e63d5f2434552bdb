"""What is trained around a central storage, to be compared with plain Keras; and the program that does it.

    python -m tests.parameter_server.central FOLDER CASE...

starts its second replica itself; under `phalanx run` the workers are the replicas. Each writes what it found, and the
first what it found without Phalanx.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from pathlib import Path
from typing import Any

from tests.parameter_server.cases import CASES as SERVER_CASES
from tests.parameter_server.cases import Case, train
from tests.support.seeds import set_random_seed


def _stop_early() -> Any:
    import keras

    return keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)


def _stop_in_the_second_epoch() -> Any:
    import keras

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.seen = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen += 1
            self.model.stop_training = self.seen == 8

    return Stop()


def _fast(keras: Any) -> Any:
    return keras.optimizers.SGD(3.0)  # which soon makes things worse


def cases() -> dict[str, Case]:
    """After Keras has its backend."""
    chosen = {
        "adam": "alone",
        "schedule": "alone_with_a_schedule",
        "accumulating": "alone_accumulating",
        "averaging_weights": "alone_averaging_weights",
        "own_train_step": "alone_with_own_train_step",
        "class_weights": "synchronous_class_weights",
        "loss_divided_by_weights": "synchronous_with_a_loss_divided_by_weights",
        "wide": "synchronous_wide",
    }
    return {
        **{name: SERVER_CASES[of] for name, of in chosen.items()},
        "clipped": Case(2, {}, lambda keras: keras.optimizers.AdamW(0.02, global_clipnorm=0.1)),
        "early_stopping": Case(2, {}, _fast, fit={"epochs": 8, "callbacks": [_stop_early()]}),
        "stopped_at_a_batch": Case(2, {}, fit={"epochs": 4, "callbacks": [_stop_in_the_second_epoch()]}),
    }


BATCHES, FAILED = "single_batches", "fit_that_failed"
NAMES = (
    "adam",
    "schedule",
    "accumulating",
    "averaging_weights",
    "own_train_step",
    "class_weights",
    "loss_divided_by_weights",
    "wide",
    "clipped",
    "early_stopping",
    "stopped_at_a_batch",
    BATCHES,
    FAILED,
)


def _compiled(scope: Any) -> tuple[Any, Any, Any]:
    """A small model with Adam, and 60 samples of features and targets."""
    import keras
    import numpy as np

    x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    keras.backend.clear_session()
    set_random_seed(2)
    with scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
    return model, x, y


def batches(scope: Any) -> dict[str, Any]:
    """Single batches before, between and after two `fit`s of one model, of which the optimizer counts its own steps."""
    import keras

    model, x, y = _compiled(scope)
    found = [model.train_on_batch(x[:21], y[:21])]
    counted: list[int] = []
    count = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: counted.append(int(model.optimizer.iterations)))
    for _ in range(2):
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[count])
        counted.append(int(model.optimizer.iterations))
        found += [history.history["loss"], model.train_on_batch(x[:20], y[:20]), model.test_on_batch(x[:7], y[:7])]
    predicted = model.predict_on_batch(x[:5])
    return {"losses": found, "counted": counted, "predicted": predicted, "weights": model.get_weights()}


def after_a_failure(scope: Any) -> dict[str, Any]:
    """What a model does after a callback has raised in the middle of its `fit`, on all replicas."""
    import keras

    model, x, y = _compiled(scope)

    def fail(batch: int, logs: Any) -> None:
        if batch == 2:
            raise InterruptedError

    failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with contextlib.suppress(InterruptedError):
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False, callbacks=[failing])
    found = [model.evaluate(x, y, verbose=0), model.train_on_batch(x[:20], y[:20])]
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    return {"losses": [*found, history.history["loss"]], "weights": model.get_weights()}


def run(name: str, scope: Any) -> dict[str, Any]:
    of_their_own = {BATCHES: batches, FAILED: after_a_failure}
    return of_their_own[name](scope) if name in of_their_own else train(cases()[name], scope)


def main() -> None:
    import numpy as np

    import phalanx

    folder = Path(sys.argv[1])
    strategy = phalanx.CentralStorageStrategy(2)
    assert strategy.num_replicas_in_sync == 2
    total = strategy.reduce("SUM", np.float32(strategy.rank + 1))
    assert float(total) == 3.0
    for name in sys.argv[2:]:
        found = {"job": run(name, strategy.scope())}
        if strategy.is_chief:
            found["plain"] = run(name, contextlib.nullcontext())
        (folder / f"{name}.{strategy.rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
