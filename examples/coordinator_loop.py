"""A custom training loop with parameter servers: a coordinator schedules steps on workers as they become free.

    phalanx run --ps 1 --chief --workers 2 examples/coordinator_loop.py

The chief schedules functions of several steps each and joins them at the end of an epoch. A function runs on any
worker, reads that worker's own dataset, and sends its gradients to the servers, which run Adam. A lost worker costs
only time: its function runs on another one. Data: scikit-learn's digits.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import phalanx

HELD_OUT = 360  # samples at the end


def load_data() -> tuple[np.ndarray, ...]:
    """x_train, y_train, x_test, y_test: scikit-learn's digits as rows of 64 grey values from 0 to 1."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(x))
    x, y = (x[order] / 16.0).astype("float32"), y[order].astype("int32")
    return x[:-HELD_OUT], y[:-HELD_OUT], x[-HELD_OUT:], y[-HELD_OUT:]


def endless_batches(batch_size: int, seed: int):
    """Batches of the training images without end, in an order of this worker's own."""
    x, y, _, _ = load_data()
    random = np.random.default_rng(seed)
    while True:
        rows = random.integers(len(x), size=batch_size)
        yield x[rows], y[rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--functions", type=int, default=8, help="functions scheduled per epoch")
    parser.add_argument("--steps", type=int, default=10, help="steps per function")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a step")
    options = parser.parse_args()

    # Every task runs this. What functions use of Keras is made here, in the scope.
    strategy = phalanx.ParameterServerStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        optimizer = keras.optimizers.Adam(3e-3)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    coordinator = phalanx.coordinator.ClusterCoordinator(strategy)
    # Only the chief comes here; the others run what it schedules.
    gradients_of = make_gradient_function(model)

    def steps(batches) -> float:
        losses = []
        for _ in range(options.steps):
            x, y = next(batches)
            loss, logits, gradients = gradients_of(x, y)
            optimizer.apply(gradients, model.trainable_variables)  # on the servers
            accuracy.update_state(y, logits)
            losses.append(float(loss))
        return float(np.mean(losses))

    def make_dataset(context: phalanx.InputContext):
        return endless_batches(options.batch_size, seed=context.input_pipeline_id)

    batches = iter(coordinator.create_per_worker_dataset(make_dataset))
    for epoch in range(options.epochs):
        accuracy.reset_state()
        losses = [coordinator.schedule(steps, args=(batches,)) for _ in range(options.functions)]
        coordinator.join()
        loss = np.mean(coordinator.fetch(losses))
        print(f"epoch {epoch + 1}: loss {loss:.4f} accuracy {float(accuracy.result()):.4f}")

    _, _, x_test, y_test = load_data()
    right = np.argmax(model.predict(x_test, verbose=0), axis=-1) == y_test
    print(f"updates       {int(optimizer.iterations)}")
    print(f"test accuracy {right.mean():.2%}")


def make_gradient_function(model: keras.Model):
    """`(x, y) -> loss, logits, gradients`, in the manner of the backend."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if keras.backend.backend() == "jax":
        import jax

        @jax.jit
        def compute(trainable, state, x, y):
            def loss_and_logits(trainable):
                logits, _ = model.stateless_call(trainable, state, x, training=True)
                return loss_of(y, logits), logits

            (loss, logits), gradients = jax.value_and_grad(loss_and_logits, has_aux=True)(trainable)
            return loss, logits, gradients

        def gradients_of(x, y):
            trainable = [variable.value for variable in model.trainable_variables]
            return compute(trainable, [variable.value for variable in model.non_trainable_variables], x, y)

    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        @tf.function
        def gradients_of(x, y):
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = loss_of(y, logits)
            return loss, logits, tape.gradient(loss, model.trainable_variables)

    else:
        import torch

        def gradients_of(x, y):
            model.zero_grad()
            logits = model(torch.from_numpy(x), training=True)
            loss = loss_of(torch.from_numpy(y), logits)
            loss.backward()
            return loss.detach(), logits.detach(), [variable.value.grad for variable in model.trainable_variables]

    return gradients_of


if __name__ == "__main__":
    main()
