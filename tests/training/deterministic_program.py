"""Trains with `CommunicationOptions(deterministic=True)`, and records every bit of the results.

    deterministic_program.py FILE MICRO_BATCHES DROPOUT MODEL ...

The chief writes FILE. As a single process without dropout, it trains the models with plain Keras as well.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from tests.support.seeds import set_random_seed

L = keras.layers


def mlp(dropout: float) -> Any:
    layers = [
        L.Dense(48, "relu"),
        L.Dropout(dropout),
        L.Dense(33, "tanh"),
        L.BatchNormalization(),
        L.Dense(1, "sigmoid"),
    ]
    model = keras.Sequential([keras.Input((20,)), *layers])
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=0.5)
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy", "auc"], weighted_metrics=["mae"])
    return model


def data_of_mlp() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(103, 20)).astype("float32")
    return x, (x[:, :1] > 0).astype("float32"), random.uniform(size=103)


def fit_mlp(model: Any) -> dict[str, Any]:
    x, y, weights = data_of_mlp()
    validation = (x[:71], y[:71], weights[:71])
    history = model.fit(
        x, y, 40, epochs=2, sample_weight=weights, validation_data=validation, validation_batch_size=33, verbose=0
    )
    return {"history": history.history}


def train_mlp(model: Any) -> dict[str, Any]:
    found = fit_mlp(model)
    x, y, _ = data_of_mlp()
    more = model.fit(x, y, 40, class_weight={0: 1.0, 1: 3.0}, verbose=0).history
    return {
        **found,
        "of weighted classes": more,
        "train_on_batch": model.train_on_batch(x[:7], y[:7]),
        "test_on_batch": model.test_on_batch(x[:31], y[:31]),
        "evaluate": model.evaluate(x, y, 37, verbose=0),
        "predict": model.predict(x, 40, verbose=0),
        "predict_on_batch": model.predict_on_batch(x[:31]),
    }


def sequence(dropout: float) -> Any:
    """Masks, whose losses divide by the unmasked part of the global batch; an optimizer that accumulates gradients."""
    layers = [L.Embedding(30, 8, mask_zero=True), L.Dropout(dropout, seed=5), L.GRU(12, return_sequences=True)]
    model = keras.Sequential([keras.Input((7,), dtype="int32"), *layers, L.Dense(30)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-2, gradient_accumulation_steps=2), loss, metrics=["accuracy"])
    return model


def train_sequence(model: Any) -> dict[str, Any]:
    random = np.random.default_rng(1)
    tokens = random.integers(1, 30, size=(90, 7))
    tokens[:, 4:] *= random.integers(0, 2, size=(90, 3))
    generator = ((tokens[start : start + 25], tokens[start : start + 25]) for start in range(0, 90, 25))
    return {
        "history": model.fit(tokens, tokens, 20, epochs=2, verbose=0).history,
        "of a generator": model.fit(generator, verbose=0).history,
        "evaluate": model.evaluate(tokens, tokens, 33, verbose=0),
        "predict": model.predict(tokens, verbose=0),
    }


def rows(dropout: float) -> Any:
    """Rows of embeddings: token rows occur several times in a batch, position rows occur in each sample."""
    tokens, positions = keras.Input((7,), dtype="int32"), keras.Input((7,), dtype="int32")
    embedded = L.Embedding(11, 8)(tokens) + L.Embedding(7, 8)(positions)
    model = keras.Model([tokens, positions], L.Dense(1)(L.Flatten()(L.Dropout(dropout)(embedded))))
    model.compile(keras.optimizers.Adam(1e-2), "mae", metrics=["mse"], weighted_metrics=[])
    return model


def train_rows(model: Any) -> dict[str, Any]:
    random = np.random.default_rng(3)
    tokens, positions = random.integers(0, 11, size=(95, 7)), np.tile(np.arange(7), (95, 1))
    return {"history": model.fit([tokens, positions], tokens.mean(1), 30, epochs=2, verbose=0).history}


def convolution(dropout: float) -> Any:
    """A convolutional model. PyTorch has no `steps_per_execution`."""
    steps = 1 if keras.backend.backend() == "torch" else 2
    layers = [L.Conv2D(8, 3), L.BatchNormalization(), L.ReLU(), L.SpatialDropout2D(dropout), L.GlobalMaxPooling2D()]
    model = keras.Sequential([keras.Input((9, 9, 2)), *layers, L.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], steps_per_execution=steps)
    return model


def train_convolution(model: Any) -> dict[str, Any]:
    x = np.random.default_rng(2).normal(size=(110, 9, 9, 2)).astype("float32")
    y = (x.mean((1, 2, 3)) * 9).astype(int) % 3
    return {
        "history": model.fit(x, y, 48, epochs=2, validation_split=0.2, verbose=0).history,
        "predict": model.predict(x, 64, verbose=0),
    }


MODELS = {
    "mlp": (mlp, train_mlp),
    "mlp_in_fit": (mlp, fit_mlp),
    "sequence": (sequence, train_sequence),
    "rows": (rows, train_rows),
    "convolution": (convolution, train_convolution),
}


def trained(build: Any, train: Any, dropout: float, scope: Any) -> dict[str, Any]:
    set_random_seed(3)
    with scope:
        model = build(dropout)
    found: dict[str, Any] = train(model)
    found["weights"] = model.get_weights()
    found["optimizer"] = [keras.ops.convert_to_numpy(variable.value) for variable in model.optimizer.variables]
    return found


def main(file: Path, micro_batches: int, dropout: float, names: list[str]) -> None:
    options = phalanx.CommunicationOptions(deterministic=True, micro_batches=micro_batches)
    strategy = phalanx.MultiWorkerMirroredStrategy(communication_options=options)
    found: dict[str, Any] = {name: trained(*MODELS[name], dropout, strategy.scope()) for name in names}
    if strategy.num_replicas_in_sync == 1 and not dropout:
        found |= {f"plain {name}": trained(*MODELS[name], dropout, contextlib.nullcontext()) for name in names}
    if strategy.is_chief:
        file.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
