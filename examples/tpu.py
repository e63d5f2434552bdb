"""Trains a transformer that is divided over the devices of a TPU, on handwritten digits, read row by row.

    phalanx plan examples/tpu.py --topology v5e:2x4      what it would need on eight TPUs; runs without TPUs
    python examples/tpu.py                               on a TPU host, with JAX for TPUs: pip install '.[tpu]'

Compiled for v5e:2x4, never run on one. It also runs on parts of a CPU, slowly:

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 PJRT_NPROC=4 python examples/tpu.py --width 64 --blocks 1

Every device holds a part of the weights and of the optimizer's state (`ShardedStrategy`), and each step gathers the
weights while it needs them. TPUs multiply matrices in bfloat16; `mixed_bfloat16` also keeps the activations so, which
halves their memory. The weights stay in float32.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # the only backend with one program over many devices

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import phalanx

ROWS, PIXELS, CLASSES, HEADS = 8, 8, 10, 4
"""An image is a sequence of rows."""


def main() -> None:
    options = parse_options()
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("mixed_bfloat16")
    x_train, x_test, y_train, y_test = load_data()

    strategy = phalanx.ShardedStrategy(level=3)
    batch_size = options.batch_per_device * strategy.num_replicas_in_sync
    with strategy.scope():
        model = make_model(options.width, options.blocks)
        model.compile(
            optimizer=keras.optimizers.AdamW(options.learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    print(f"{model.count_params():,} weights on {strategy.placement}")
    model.fit(x_train, y_train, batch_size=batch_size, epochs=options.epochs, verbose=2)
    _, accuracy = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
    print(f"test accuracy {accuracy:.2%}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024, help="of the transformer; a multiple of the devices")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-per-device", type=int, default=16, help="samples of a step, on each device")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


def load_data() -> list[np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    rows = (images / 16).astype("float32").reshape(-1, ROWS, PIXELS)
    return train_test_split(rows, labels, test_size=0.2, random_state=1)


def make_model(width: int, blocks: int) -> keras.Model:
    """A transformer's encoder, with a class for the mean of its outputs."""
    inputs = keras.Input((ROWS, PIXELS))
    x = layers.Dense(width)(inputs)
    x += layers.Embedding(ROWS, width)(keras.ops.arange(ROWS))
    for _ in range(blocks):
        normal = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(HEADS, width // HEADS)(normal, normal)
        inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(width)(inner)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(CLASSES, dtype="float32")(x))


if __name__ == "__main__":
    main()
