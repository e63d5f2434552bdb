"""Horovod's Keras example, on any backend: each process trains on its own data, and gradients are averaged.

    phalanx run -np 2 --backend jax examples/horovod_keras.py

As usual with Horovod, the learning rate is scaled with the number of processes, after a warmup. All processes begin
with the weights of rank 0, and only rank 0 saves and prints. Data: scikit-learn's digits, of which a fifth is held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import phalanx.horovod.keras as hvd


def main() -> None:
    options = parse_options()
    hvd.init()

    images, digits = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        (images / 16).astype("float32").reshape(-1, 8, 8, 1), digits, test_size=0.2, random_state=0, stratify=digits
    )
    # Each process has as many samples as the others, and so as many steps.
    each = len(x_train) // hvd.size()
    x_train, y_train = (part[hvd.rank() :: hvd.size()][:each] for part in (x_train, y_train))

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    learning_rate = options.learning_rate * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate))
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=learning_rate, warmup_epochs=3, verbose=1),
    ]
    if hvd.rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        callbacks.append(keras.callbacks.ModelCheckpoint(options.out / "horovod_keras.keras"))

    model.fit(
        x_train,
        y_train,
        batch_size=options.batch_size,
        callbacks=callbacks,
        epochs=options.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.2%}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a step on each process")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of one process")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
