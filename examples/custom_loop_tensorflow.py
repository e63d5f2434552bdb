"""A custom training loop on TensorFlow, as in the `tf.distribute` guide.

    phalanx run --workers 2 --backend tensorflow examples/custom_loop_tensorflow.py

`optimizer.apply_gradients` inside `strategy.run` sums the gradients over the replicas first, so the loss is divided
by the size of the *global* batch (`phalanx.compute_average_loss`, as `tf.nn.compute_average_loss`).
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import phalanx

HELD_OUT = 360  # samples at the end


def load_data() -> tuple[np.ndarray, ...]:
    """x_train, y_train, x_test, y_test: scikit-learn's digits as rows of 64 grey values from 0 to 1."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(x))
    x, y = (x[order] / 16.0).astype("float32"), y[order].astype("int32")
    return x[:-HELD_OUT], y[:-HELD_OUT], x[-HELD_OUT:], y[-HELD_OUT:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step, over all replicas")
    options = parser.parse_args()

    strategy = phalanx.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)  # the same initial weights on every replica
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        optimizer = keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    x_train, y_train, x_test, y_test = load_data()
    global_batches = (
        tf.data.Dataset.from_tensor_slices((x_train, y_train))
        .shuffle(len(x_train), seed=1)
        .batch(options.batch_size, drop_remainder=True)
    )
    dataset = strategy.experimental_distribute_dataset(global_batches)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = phalanx.compute_average_loss(losses, global_batch_size=options.batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(x, y):
        loss = strategy.run(replica_step, args=(x, y))
        return strategy.reduce("SUM", loss, axis=None)

    for epoch in range(options.epochs):
        losses = [float(train_step(x, y)) for x, y in dataset]
        if strategy.is_chief:
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")

    if strategy.is_chief:
        accuracy.update_state(y_test, model(x_test))
        print(f"test accuracy {float(accuracy.result()):.2%}")


if __name__ == "__main__":
    main()
