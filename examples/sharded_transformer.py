"""A character transformer divided over devices, so that no device holds all of it: it learns to write Python.

    python examples/sharded_transformer.py --cpu-devices 4
    python examples/sharded_transformer.py --cpu-devices 4 --strategy model-parallel
    python examples/sharded_transformer.py --cpu-devices 1 --strategy one-device --restore runs/sharded.weights.h5

The text is the source of Python's standard library. Without `--cpu-devices`, it runs on the accelerators that JAX sees.
With `--budget-mb`, it ends before the first step if a device would hold more weights and optimizer state than that. At
the end, the weights are in an ordinary Keras file, from which training continues on any number of devices, or in plain
Keras.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
from char_lm import load_text, make_model, windows

import phalanx

MB = 1e6


def main() -> None:
    options = parse_options()
    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    strategy = make_strategy(options)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_model(options.length, options.width, options.layers)
        model.compile(
            optimizer=keras.optimizers.AdamW(options.learning_rate, global_clipnorm=1.0),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.optimizer.build(model.trainable_variables)
    if options.restore is not None:
        model.load_weights(options.restore)
    whole, held = state_bytes(model)
    print(f"{strategy}: {model.count_params():,} parameters")
    print(f"weights and optimizer: {whole / MB:.2f} MB, of which each device holds {held / MB:.2f} MB")
    if options.budget_mb is not None and held > options.budget_mb * MB:
        raise SystemExit(f"a device may hold {options.budget_mb} MB: divide over more devices, or with --level 3")

    train, held_out = (windows(text, options.length) for text in load_text(options.text_bytes))
    model.fit(
        *train,
        batch_size=options.batch_size,
        epochs=options.epochs,
        steps_per_epoch=options.steps,
        validation_data=tuple(part[:301] for part in held_out),
        validation_batch_size=100,  # the last batch is a single sequence
        verbose=2,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    model.save_weights(options.out / "sharded.weights.h5")
    print(f"weights: {options.out / 'sharded.weights.h5'}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--strategy", default="sharded", choices=["sharded", "model-parallel", "mirrored", "one-device"]
    )
    parser.add_argument("--level", type=int, default=3, help="what `sharded` divides: 1, 2 or 3")
    parser.add_argument("--cpu-devices", type=int, default=0, help="run on this many CPU devices")
    parser.add_argument("--budget-mb", type=float, help="limit of weights and optimizer state on each device")
    parser.add_argument("--restore", type=Path, help="file with the initial weights")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="steps of an epoch")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--text-bytes", type=int, default=4_000_000)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the weights")
    return parser.parse_args()


def make_strategy(options: argparse.Namespace) -> phalanx.Strategy:
    match options.strategy:
        case "sharded":
            return phalanx.ShardedStrategy(options.level)
        case "model-parallel":
            return phalanx.ModelParallelStrategy()
        case "mirrored":
            return phalanx.MirroredStrategy(engine="spmd")
    return phalanx.OneDeviceStrategy()


def state_bytes(model: keras.Model) -> tuple[int, int]:
    """The bytes of weights and optimizer state, and how many of these the first device holds."""
    values = [variable.value for variable in [*model.variables, *model.optimizer.variables]]
    return sum(v.nbytes for v in values), sum(v.addressable_shards[0].data.nbytes for v in values)


if __name__ == "__main__":
    main()
