"""Horovod's TensorFlow 2 example: a custom training step with a `DistributedGradientTape`.

    phalanx run -np 2 --backend tensorflow examples/horovod_tensorflow.py

Data: scikit-learn's digits, of which a fifth is held out.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import phalanx.horovod.tensorflow as hvd


def main() -> None:
    options = parse_options()
    hvd.init()

    images, digits = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        (images / 16).astype("float32").reshape(-1, 8, 8, 1), digits, test_size=0.2, random_state=0, stratify=digits
    )
    # Every process draws batches from all data, each in an order of its own.
    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    dataset = dataset.repeat().shuffle(len(x_train), seed=hvd.rank()).batch(options.batch_size)

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    optimizer = keras.optimizers.Adam(options.learning_rate * hvd.size())
    optimizer.build(model.trainable_variables)

    @tf.function
    def train(images: tf.Tensor, labels: tf.Tensor, *, first_batch: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        # After the first step, so that the optimizer's variables exist: all go on from rank 0's.
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    for step, (images, labels) in enumerate(dataset.take(options.steps // hvd.size())):
        loss = train(images, labels, first_batch=step == 0)
        if step % 50 == 0 and hvd.rank() == 0:
            print(f"step {step}: loss {float(loss):.4f}")

    right = tf.reduce_sum(tf.cast(tf.argmax(model(x_test), 1) == y_test, tf.float32))
    # Each process has computed the same; the average shows that they agree.
    accuracy = float(hvd.allreduce(right)) / len(y_test)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.2%}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="divided by the number of processes")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a step on each process")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of one process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
