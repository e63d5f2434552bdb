"""Models with embeddings that are trained by rows, to be compared with plain Keras; and the program that does it.

    python -m tests.parameter_server.embeddings FOLDER CASE...

Every task runs it. The chief trains the same model once more without Phalanx, and writes both results.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.seeds import set_random_seed

SAMPLES, BATCH = 101, 20  # the last batch has a single sample: fewer than there are workers
USERS, ITEMS, LENGTH = 300, 40, 5


@dataclass
class Case:
    """A way to train, and what the result must be.

    Attributes:
        workers, servers: for how many it is.
        strategy: arguments of ParameterServerStrategy.
        model: makes it.
        exact: whether the numbers must be those of plain Keras.
    """

    optimizer: Callable[[Any], Any]
    workers: int = 1
    servers: int = 2
    strategy: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    model: Callable[[Any], Any] | None = None
    exact: bool = True


def two_tables(keras: Any) -> Any:
    """Users, and items that are looked up twice, once with a mask: two layers, three calls, one of them on a slice."""
    layers = keras.layers
    users = keras.Input((1,), dtype="int32", name="user")
    items = keras.Input((LENGTH + 1,), dtype="int32", name="items")
    table = layers.Embedding(ITEMS, 4, mask_zero=True, name="of_items")
    before = layers.GlobalAveragePooling1D()(table(items[:, :LENGTH]))
    now = layers.Flatten()(layers.Embedding(ITEMS, 3, name="of_the_item")(items[:, LENGTH:]))
    again = layers.Flatten()(layers.Embedding(ITEMS, 4, name="of_the_last")(items[:, LENGTH - 1 : LENGTH]))
    user = layers.Flatten()(layers.Embedding(USERS, 4, name="of_users")(users))
    twice = layers.GlobalAveragePooling1D()(table(items[:, 1:LENGTH]))
    joined = layers.Concatenate()([before, twice, now, again, user])
    return keras.Model({"user": users, "items": items}, layers.Dense(1)(layers.Dense(8, activation="tanh")(joined)))


def sequential(keras: Any) -> Any:
    """As many write it: the model is built by the first batch, with numbers in the dtype in which they come."""
    return keras.Sequential([keras.layers.Embedding(ITEMS, 4), keras.layers.Flatten(), keras.layers.Dense(1)])


def only_rows(keras: Any) -> Any:
    """A table, and nothing else: what is trained is easily computed by hand."""
    return keras.Sequential(
        [keras.Input((1,), dtype="int32"), keras.layers.Embedding(USERS, 3), keras.layers.Flatten()]
    )


CASES = {
    "alone": Case(lambda keras: keras.optimizers.SGD(0.5)),
    "alone_in_pieces": Case(lambda keras: keras.optimizers.Adagrad(0.1), strategy={"variable_partitioner": 3}),
    "alone_in_pieces_clipped": Case(
        lambda keras: keras.optimizers.SGD(0.5, global_clipnorm=0.05), strategy={"variable_partitioner": 2}
    ),
    "alone_looking_at_epochs": Case(lambda keras: keras.optimizers.SGD(0.5), fit={"looks": True}),
    "alone_looking_at_batches": Case(lambda keras: keras.optimizers.SGD(0.5), fit={"predicts": True}),
    "alone_twice": Case(lambda keras: keras.optimizers.SGD(0.5), fit={"twice": True}),
    "alone_from_a_generator": Case(lambda keras: keras.optimizers.SGD(0.5), fit={"generator": True, "epochs": 1}),
    "sequential": Case(lambda keras: keras.optimizers.SGD(0.5), model=sequential),
    "one_server": Case(lambda keras: keras.optimizers.Adagrad(0.1, global_clipnorm=0.1), servers=1),
    "lazy_adam": Case(lambda keras: keras.optimizers.Adam(0.05), model=only_rows, fit={"shuffle": False}, exact=False),
    "synchronous": Case(lambda keras: keras.optimizers.SGD(0.5), workers=2, strategy={"synchronous": True}),
    "synchronous_in_pieces": Case(
        lambda keras: keras.optimizers.Adagrad(0.1),
        workers=2,
        strategy={"synchronous": True, "variable_partitioner": 3},
    ),
    "asynchronous": Case(lambda keras: keras.optimizers.Adam(0.02), workers=2, fit={"epochs": 8}, exact=False),
    "bounded_staleness": Case(
        lambda keras: keras.optimizers.Adam(0.02),
        workers=2,
        strategy={"staleness": 1, "compression": "float16"},
        fit={"epochs": 8},
        exact=False,
    ),
}


def data(case: Case) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    # Few of the users and all of the items, so that batches share some rows, and some rows are never touched.
    users = random.integers(0, USERS // 6, (SAMPLES, 1)).astype("int32") * 5
    items = random.integers(0, ITEMS, (SAMPLES, LENGTH + 1)).astype("int32")
    y = np.sin(users + items[:, -1:]).astype("float32")
    if case.model is sequential:
        items[:, 0] -= 2  # negative ones count from the end, as in Keras
        return items.astype("int64"), y
    if case.model is only_rows:
        return users, np.sin(users + np.arange(3)).astype("float32")
    return {"user": users, "items": items}, y


def _batches(x: dict[str, Any], y: Any) -> Any:
    for start in range(0, SAMPLES, BATCH):
        rows = slice(start, start + BATCH)
        yield {name: numbers[rows] for name, numbers in x.items()}, y[rows]


def _with_summed_gradients(optimizer: Any) -> None:
    """Keras on TensorFlow squares the gradients of a row that a batch looks up twice one by one, where it clips or
    divides by them; on the other backends, and here, their sum is squared."""
    import tensorflow as tf

    apply = optimizer.apply
    vars(optimizer)["apply"] = lambda grads, variables=None: apply([tf.convert_to_tensor(g) for g in grads], variables)


def _train(case: Case, scope: Any, *, plain: bool = False) -> dict[str, Any]:
    import keras
    import numpy as np

    x, y = data(case)
    keras.backend.clear_session()
    set_random_seed(1)
    with scope:
        model = (case.model or two_tables)(keras)
        model.compile(case.optimizer(keras), "mse", metrics=["mae"])
    if plain and keras.backend.backend() == "tensorflow":
        _with_summed_gradients(model.optimizer)
    options = dict(case.fit)
    seen: list[Any] = []
    callbacks = []
    if options.pop("looks", False):
        note = lambda epoch, logs: seen.append([np.array(weight) for weight in model.get_weights()])  # noqa: E731
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=note))
    if options.pop("predicts", False):
        some = {name: numbers[:7] for name, numbers in x.items()}

        class Predict(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch in (1, 4):
                    seen.append(np.array(self.model.predict_on_batch(some)))

        callbacks.append(Predict())
    if case.model is sequential:
        model.build((None, LENGTH + 1))
    start = [np.array(weight) for weight in model.get_weights()]
    given = {"x": x, "y": y, "batch_size": BATCH, "epochs": 2, "verbose": 0, "validation_data": (x, y)}
    if options.pop("generator", False):
        given |= {"x": _batches(x, y), "y": None, "batch_size": None}
    twice = options.pop("twice", False)
    history = model.fit(**{**given, "callbacks": callbacks, **options})
    if twice:
        seen.append(history.history)
        history = model.fit(**{**given, **options})
    # At the end of a generator Keras on TensorFlow counts a step that it does not make.
    kept = model.optimizer.variables[1:] if "generator" in case.fit else model.optimizer.variables
    state = [np.array(keras.ops.convert_to_numpy(variable)) for variable in kept]
    return {
        "start": start,
        "history": history.history,
        "evaluated": model.evaluate(x, y, verbose=0),
        "weights": model.get_weights(),
        "paths": [weight.path for weight in model.weights],
        "optimizer": state,
        "seen": seen,
    }


def main() -> None:
    import contextlib

    import phalanx
    from phalanx.training import sparse_embeddings

    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        case = CASES[name]
        options: dict[str, Any] = {"embedding_rows": True} | case.strategy
        if "variable_partitioner" in options:
            options["variable_partitioner"] = phalanx.FixedShardsPartitioner(options["variable_partitioner"])
        strategy = phalanx.ParameterServerStrategy(**options)
        loaded = _count_loads(sparse_embeddings.SparseEmbeddings)
        found = {"job": _train(case, strategy.scope()), "tables": set(loaded)}
        if strategy.is_chief:
            found["plain"] = _train(case, contextlib.nullcontext(), plain=True)
        (folder / f"{name}.{strategy.rank}").write_bytes(pickle.dumps(found))


def _count_loads(kind: Any) -> list[str]:
    """The tables whose rows were loaded, noted from now on: that the case is about rows at all."""
    loaded: list[str] = []
    load = getattr(kind, "_plain_load", kind.load)
    kind._plain_load = load

    def noting(self: Any, *arguments: Any) -> None:
        loaded.extend(table.layer.name for table in self.tables)
        load(self, *arguments)

    kind.load = noting
    return loaded


if __name__ == "__main__":
    main()
