"""A custom training loop on PyTorch, over any number of replicas.

    phalanx run --workers 2 --backend torch examples/custom_loop_torch.py

A Keras optimizer applied inside `strategy.run` sums the gradients over the replicas first, so the loss is divided by
the size of the *global* batch. An optimizer of `torch.optim` does not know the replicas: set its parameters' gradients
to those that `strategy.reduce("SUM", gradients)` returns (`--optimizer torch` does that).
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from sklearn.datasets import load_digits

import phalanx

HELD_OUT = 360  # samples at the end


def load_data() -> tuple[np.ndarray, ...]:
    """x_train, y_train, x_test, y_test: scikit-learn's digits as rows of 64 grey values from 0 to 1."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(x))
    x, y = (x[order] / 16.0).astype("float32"), y[order].astype("int64")
    return x[:-HELD_OUT], y[:-HELD_OUT], x[-HELD_OUT:], y[-HELD_OUT:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step, over all replicas")
    parser.add_argument("--optimizer", choices=("keras", "torch"), default="keras")
    options = parser.parse_args()

    strategy = phalanx.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)  # the same initial weights on every replica
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
    weights = model.trainable_weights
    keras_optimizer = keras.optimizers.Adam(3e-3)
    torch_optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    cross_entropy = torch.nn.CrossEntropyLoss(reduction="sum")

    x_train, y_train, x_test, y_test = load_data()
    samples = torch.utils.data.TensorDataset(torch.from_numpy(x_train), torch.from_numpy(y_train))
    global_batches = torch.utils.data.DataLoader(
        samples,
        batch_size=options.batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(1),  # the same order on every replica
    )
    dataset = strategy.experimental_distribute_dataset(global_batches)

    def replica_step(x, y):
        model.zero_grad()
        loss = cross_entropy(model(x, training=True), y) / options.batch_size
        loss.backward()
        gradients = [weight.value.grad for weight in weights]
        with torch.no_grad():
            if options.optimizer == "keras":
                keras_optimizer.apply(gradients, weights)
            else:
                for weight, gradient in zip(weights, strategy.reduce("SUM", gradients), strict=True):
                    weight.value.grad = gradient
                torch_optimizer.step()
        return loss.detach()

    for epoch in range(options.epochs):
        losses = []
        for x, y in dataset:  # this replica's part of each global batch
            loss = strategy.run(replica_step, args=(x, y))
            losses.append(float(strategy.reduce("SUM", loss)))
        if strategy.is_chief:
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")

    if strategy.is_chief:
        with torch.no_grad():
            right = model(torch.from_numpy(x_test)).argmax(-1).cpu().numpy() == y_test
        print(f"test accuracy {right.mean():.2%}")


if __name__ == "__main__":
    main()
