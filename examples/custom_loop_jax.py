"""A custom training loop on JAX, over any number of replicas.

    phalanx run --workers 2 --backend jax examples/custom_loop_jax.py

A step is two jitted functions; between them, the replicas' gradients are summed on the host. The loss is the
sum over this replica's samples divided by the size of the *global* batch, so that the sum over the replicas is the
mean over the batch, even if the parts have different sizes.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
from sklearn.datasets import load_digits

import phalanx

HELD_OUT = 360  # samples at the end


class Digits(keras.utils.PyDataset):
    """Global batches of the training images, in a new order each epoch, the same on every replica."""

    def __init__(self, batch_size: int):
        super().__init__()
        x, y, _, _ = load_data()
        self._x, self._y, self._batch_size = x, y, batch_size
        self._random = np.random.default_rng(seed=1)
        self.on_epoch_end()

    def __len__(self) -> int:
        return -(-len(self._x) // self._batch_size)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        return self._x[rows], self._y[rows]

    def on_epoch_end(self) -> None:
        self._order = self._random.permutation(len(self._x))


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

    def summed_loss(trainable, non_trainable, x, y):
        logits, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return jnp.sum(losses), non_trainable

    @jax.jit
    def compute(trainable, non_trainable, x, y, global_size):
        (loss, non_trainable), gradients = jax.value_and_grad(summed_loss, has_aux=True)(trainable, non_trainable, x, y)
        return loss / global_size, [gradient / global_size for gradient in gradients], non_trainable

    @jax.jit
    def update(optimizer_state, gradients, trainable):
        return optimizer.stateless_apply(optimizer_state, gradients, trainable)

    dataset = strategy.experimental_distribute_dataset(Digits(options.batch_size))
    trainable = [variable.value for variable in model.trainable_variables]
    non_trainable = [variable.value for variable in model.non_trainable_variables]
    optimizer_state = [variable.value for variable in optimizer.variables]
    for epoch in range(options.epochs):
        losses = []
        for x, y in dataset:  # this replica's part of each global batch
            global_size = strategy.reduce("SUM", jnp.asarray(float(len(x))))
            loss, gradients, non_trainable = compute(trainable, non_trainable, x, y, global_size)
            loss, gradients = strategy.reduce("SUM", (loss, gradients))
            trainable, optimizer_state = update(optimizer_state, gradients, trainable)
            losses.append(float(loss))
        if strategy.is_chief:
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")

    for variables, values in (
        (model.trainable_variables, trainable),
        (model.non_trainable_variables, non_trainable),
        (optimizer.variables, optimizer_state),
    ):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    if strategy.is_chief:
        _, _, x_test, y_test = load_data()
        right = np.argmax(np.asarray(model(x_test)), axis=-1) == y_test
        print(f"test accuracy {right.mean():.2%}")


if __name__ == "__main__":
    main()
