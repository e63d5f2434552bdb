"""Learns to write Python: a small character transformer on the source of Python's standard library.

    PHALANX_SIMULATED_MBITS=100 phalanx run --workers 2 examples/char_lm.py
    phalanx run --workers 2 examples/char_lm.py --strategies diloco --compression int8

The text is on every machine that has Python. The program trains the same model twice from the same initial weights:
with the plain strategy, which merges gradients at every step, and with `DiLoCoStrategy`, whose replicas exchange
weights every 50 steps. PHALANX_SIMULATED_MBITS limits the megabits per second that each process sends, to simulate a
slow network. The program ends with a table and a plot of the held-out loss against bytes sent and against time:
runs/char_lm.png.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import keras
import numpy as np

import phalanx

CHARACTERS = 128
"""ASCII; everything else becomes a question mark."""
HELD_OUT = 0.05


@dataclass
class Curve:
    """How a training went: one entry for each epoch.

    Attributes:
        losses: held out, in nats for each character.
        megabytes: sent by the chief until then.
        seconds: since the end of the first epoch, which compiles; that one counts as long as the second.
    """

    name: str
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    options = parse_options()
    train, held_out = (windows(text, options.length) for text in load_text(options.text_bytes))
    curves = [run(name, options, train, held_out) for name in options.strategies.split(",")]
    if options.is_chief:
        print(table(curves))
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "char_lm.json").write_text(json.dumps([asdict(curve) for curve in curves], indent=1) + "\n")
        print(f"plot: {plot(curves, options.out / 'char_lm.png')}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", default="plain,diloco", help="plain, local_sgd, diloco; comma-separated")
    parser.add_argument("--compression", default=None, help="float16, bfloat16, int8, int6, int4, top_k, ...")
    parser.add_argument("--sync-every", type=int, default=50, help="steps between two exchanges of DiLoCo")
    parser.add_argument("--outer-learning-rate", type=float, default=0.8)
    parser.add_argument("--outer-momentum", type=float, default=0.65)
    parser.add_argument("--overlap", action="store_true", help="exchange during the next steps")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100, help="steps of an epoch")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a step, over all replicas")
    parser.add_argument("--length", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text-bytes", type=int, default=4_000_000)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for plot and figures")
    parser.add_argument("--verbose", default="auto", help="as in model.fit: 0 shows no progress bar")
    options = parser.parse_args()
    options.verbose = options.verbose if options.verbose == "auto" else int(options.verbose)
    return options


def load_text(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Characters of the standard library's modules, by name, as numbers below 128: for training, and held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:size]
    codes = np.frombuffer(text, np.uint8)
    codes = np.where(codes < CHARACTERS, codes, ord("?"))
    cut = int(len(codes) * (1 - HELD_OUT))
    return codes[:cut], codes[cut:]


def windows(codes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and the characters that follow them, both of shape (n, length)."""
    count = (len(codes) - 1) // length
    inputs, following = codes[: count * length], codes[1 : count * length + 1]
    return inputs.reshape(count, length).astype("int32"), following.reshape(count, length).astype("int32")


def run(name: str, options: argparse.Namespace, train: tuple, held_out: tuple) -> Curve:
    """Train from the same start with one strategy."""
    strategy = make_strategy(name, options)
    options.is_chief = strategy.is_chief
    keras.utils.set_random_seed(options.seed)
    total = options.epochs * options.steps
    with strategy.scope():
        model = make_model(options.length, options.width, options.layers)
        rate = keras.optimizers.schedules.CosineDecay(
            0.0, total, alpha=0.05, warmup_target=options.learning_rate, warmup_steps=total // 20
        )
        model.compile(
            optimizer=keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    if strategy.is_chief:
        print(f"{name}: {model.count_params():,} parameters, {strategy.num_replicas_in_sync} replica(s)")
    recorder = Recorder(Curve(name), strategy, options.steps)
    model.fit(
        *train,
        batch_size=options.batch_size,
        epochs=options.epochs,
        steps_per_epoch=options.steps,
        validation_data=tuple(part[:512] for part in held_out),
        validation_batch_size=128,
        callbacks=[recorder],
        verbose=options.verbose,
    )
    recorder.finish()
    if strategy.is_chief:
        print(strategy.communication_summary())
    return recorder.curve


def make_strategy(name: str, options: argparse.Namespace) -> phalanx.Strategy:
    common = {"compression": options.compression}
    if name == "plain":
        return phalanx.MultiWorkerMirroredStrategy(**common)
    common["overlap"] = options.overlap
    if name == "local_sgd":
        return phalanx.LocalSGDStrategy(options.sync_every, **common)
    if name == "diloco":
        outer = phalanx.OuterSGD(options.outer_learning_rate, options.outer_momentum)
        return phalanx.DiLoCoStrategy(options.sync_every, outer, **common)
    raise SystemExit(f"--strategies: {name!r} is none of plain, local_sgd, diloco")


def make_model(length: int, width: int, layers: int) -> keras.Model:
    inputs = keras.Input((length,), dtype="int32")
    # From the inputs: a layer that is called on a constant is no part of the model, and would not be trained.
    places = keras.ops.cumsum(keras.ops.ones_like(inputs), axis=1) - 1
    x = keras.layers.Embedding(CHARACTERS, width)(inputs) + keras.layers.Embedding(length, width)(places)
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(width)(keras.layers.Dense(4 * width, activation="gelu")(y))
    return keras.Model(inputs, keras.layers.Dense(CHARACTERS)(keras.layers.LayerNormalization()(x)))


class Recorder(keras.callbacks.Callback):
    """Writes down the curve of a training; the time of validation does not count."""

    def __init__(self, curve: Curve, strategy: phalanx.Strategy, steps: int) -> None:
        super().__init__()
        self.curve = curve
        self._strategy = strategy
        self._steps = steps
        self._before = strategy.bytes_sent
        self._seconds: list[float] = []
        self._start = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._start = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:
        self._seconds.append(time.perf_counter() - self._start)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.curve.steps.append((epoch + 1) * self._steps)
        self.curve.losses.append(logs["val_loss"])
        self.curve.megabytes.append((self._strategy.bytes_sent - self._before) / 1e6)

    def finish(self) -> None:
        seconds = [*self._seconds[1:2], *self._seconds[1:]] or self._seconds
        self.curve.seconds = [float(total) for total in np.cumsum(seconds)]
        self.curve.megabytes[-1] = (self._strategy.bytes_sent - self._before) / 1e6  # with the end of `fit`


def table(curves: list[Curve]) -> str:
    lines = ["| strategy | held-out loss | MB sent | seconds | steps/s |", "|---|---|---|---|---|"]
    for curve in curves:
        speed = curve.steps[-1] / curve.seconds[-1]
        lines.append(
            f"| {curve.name} | {curve.losses[-1]:.4f} | {curve.megabytes[-1]:,.1f} | {curve.seconds[-1]:.1f} "
            f"| {speed:.2f} |"
        )
    return "\n".join(lines)


def plot(curves: list[Curve], path: Path) -> Path:
    """Draw held-out loss against bytes and against time; returns `path`."""
    import matplotlib

    matplotlib.use("Agg")  # draws to files, also where there is no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for curve in curves:
        axes[0].plot(curve.megabytes, curve.losses, marker=".", label=curve.name)
        axes[1].plot(curve.seconds, curve.losses, marker=".", label=curve.name)
    axes[0].set(xlabel="MB sent by one process", ylabel="held-out loss", xscale="log")
    axes[1].set(xlabel="seconds")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    rate = os.environ.get("PHALANX_SIMULATED_MBITS")
    figure.suptitle(f"character model, {'no limit' if rate is None else f'{rate} Mbit/s'}, {keras.backend.backend()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    main()
