"""Trains a model by one program over all workers, and compares it with one that Keras alone has trained before:

    python -m tests.engines.spanning_fit FOLDER
    phalanx run --workers 2 -m tests.engines.spanning_fit FOLDER STRATEGY [alone]

where STRATEGY is an expression such as "ShardedStrategy(level=3)". With "alone", each process then trains a model
outside of the scope as well.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from phalanx.engines.spmd.global_arrays import fetch
from phalanx.training import joint_batches
from tests.support.seeds import set_random_seed

SAMPLES, BATCH, LENGTH, WIDTH = 43, 8, 6, 32  # the last batch has three samples
VOCABULARY = 40
PLAIN = "plain.pickle"


def main(folder: Path, expression: str, *options: str) -> None:
    strategy = eval(f"phalanx.{expression}", {"phalanx": phalanx})
    replica = strategy._replica
    read = count_samples_read()
    with strategy.scope():
        model = transformer()
    found = train(model)
    parts = replica.gather(sum(read))
    assert max(parts) - min(parts) < len(read), f"samples that the ranks have read: {parts}"
    weights = [fetch(variable.value) for variable in model.variables]
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).digest()
    assert len(set(replica.communicator.all_gather_bytes(digest))) == 1, "the ranks have different bits"

    expected = pickle.loads((folder / PLAIN).read_bytes())
    for each in [found, *(train(transformer()) for _ in options)]:
        for name, value in expected["found"].items():
            np.testing.assert_allclose(each[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
    for variable, weight, plain in zip(model.variables, weights, expected["weights"], strict=True):
        np.testing.assert_allclose(weight, plain, rtol=1e-4, atol=1e-4, err_msg=variable.path)
    divided = [variable for variable in model.trainable_variables if not variable.value.is_fully_replicated]
    print("rank", strategy.rank, "agrees;", len(divided), "weights are divided")


def train_alone(folder: Path) -> None:
    model = transformer()
    found = train(model)
    weights = [np.asarray(variable.value) for variable in model.variables]
    (folder / PLAIN).write_bytes(pickle.dumps({"found": found, "weights": weights}))


def transformer() -> Any:
    """Of one block; built alike wherever it is built."""
    set_random_seed(3)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, WIDTH // 2)(x, x))
    x = keras.layers.BatchNormalization()(x + keras.layers.Dense(WIDTH)(keras.layers.Dense(2 * WIDTH, "relu")(x)))
    outputs = keras.layers.Dense(VOCABULARY)(x)
    model = keras.Model(tokens, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.003, epsilon=1e-3)  # with the usual 1e-7 it turns rounding of zero into steps
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def train(model: Any) -> dict[str, Any]:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (SAMPLES, LENGTH + 1)).astype("int32")
    x, y = tokens[:, :-1], tokens[:, 1:]
    weights = np.linspace(0.5, 2.0, SAMPLES * LENGTH).astype("float32").reshape(SAMPLES, LENGTH)
    validation = (x[:13], y[:13])
    fitted = model.fit(x, y, BATCH, epochs=2, sample_weight=weights, validation_data=validation, verbose=0)
    return {
        **fitted.history,
        "evaluated": model.evaluate(x, y, batch_size=BATCH, verbose=0),
        "predicted": model.predict(x, batch_size=BATCH, verbose=0),
    }


def count_samples_read() -> list[int]:
    """How many samples of each batch this process has read itself."""
    read: list[int] = []
    original = joint_batches.fit_to_mesh

    def counting(batch: Any, replica: Any, parts: int) -> Any:
        read.append(batch.size)
        return original(batch, replica, parts)

    joint_batches.fit_to_mesh = counting
    return read


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), *sys.argv[2:])
    else:
        train_alone(Path(sys.argv[1]))
