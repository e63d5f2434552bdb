"""Learns to read handwritten digits with a parameter server: each worker takes the next batch when it is free.

    phalanx run --ps 1 --workers 2 examples/parameter_server_digits.py

The server holds the weights and runs Adam. Each worker fetches the weights, computes the gradients of a batch and sends
them, without waiting for the other worker. Data: scikit-learn's digits, of which a fifth is held out.
"""

from __future__ import annotations

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import phalanx


def main() -> None:
    options = parse_options()
    strategy = phalanx.ParameterServerStrategy(synchronous=options.synchronous)
    keras.utils.set_random_seed(options.seed)
    images, digits = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        (images / 16).astype("float32"), digits, test_size=0.2, random_state=0, stratify=digits
    )
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile(
            keras.optimizers.Adam(3e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(
        x_train,
        y_train,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(x_test, y_test),
        verbose=options.verbose,
    )
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    if strategy.is_chief:
        print(f"updates       {strategy.global_step}")
        print(f"test accuracy {accuracy:.2%}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of an update")
    parser.add_argument("--synchronous", action="store_true", help="merge the workers' gradients of each step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", type=int, default=1, help="as in model.fit: 0 shows no progress bar")
    return parser.parse_args()


if __name__ == "__main__":
    main()
