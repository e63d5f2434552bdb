"""A recommender with a table of two million users: only the rows that a batch uses are sent.

    phalanx run --ps 1 --workers 2 examples/embedding_rows.py

Every user and every item has a row of numbers, learned from likes. A network predicts from two rows whether this
user likes that item. The tables are on the server. For each batch, a worker fetches the rows of its users and items and
sends their gradients. At the end, it prints how many bytes it sent, and how many the whole tables would have taken. The
program generates the likes: users and items have kinds, and a user of one kind mostly likes items of three others.
"""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np

import phalanx

KINDS = 8
ACTIVE = 3000
"""Users with ratings. The rows of all others are never requested."""


class Traffic(keras.callbacks.Callback):
    """Notes what each step takes. What happens where epochs begin and end is not counted."""

    def __init__(self, strategy: phalanx.ParameterServerStrategy):
        super().__init__()
        self._strategy = strategy
        self._last: list[float] = []
        self.steps: list[list[float]] = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        now = [self._strategy.bytes_sent, self._strategy.bytes_received, time.perf_counter()]
        if batch > 0:
            self.steps.append([new - old for new, old in zip(now, self._last, strict=True)])
        self._last = now


def main() -> None:
    options = parse_options()
    strategy = phalanx.ParameterServerStrategy(embedding_rows=options.embedding_rows)
    keras.utils.set_random_seed(options.seed)
    data, liked = make_likes(options.users, options.items, options.samples, options.seed)
    held_out = options.samples // 10
    with strategy.scope():
        model = make_model(options.users, options.items, options.width)
        model.compile(
            keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["binary_accuracy"]
        )
    traffic = Traffic(strategy)
    model.fit(
        {name: numbers[held_out:] for name, numbers in data.items()},
        liked[held_out:],
        batch_size=options.batch_size,
        epochs=options.epochs,
        callbacks=[traffic],
        verbose=options.verbose,
    )
    if strategy.is_chief:
        _, accuracy = model.evaluate(
            {name: numbers[:held_out] for name, numbers in data.items()}, liked[:held_out], batch_size=4096, verbose=0
        )
        sent, received, seconds = np.median(traffic.steps, axis=0)
        whole = sum(weight.nbytes for weight in model.get_weights())
        print(f"test accuracy {accuracy:.2%}")
        print(f"a step sends {sent:,.0f} bytes and receives {received:,.0f}, in {seconds * 1000:.2f} ms")
        print(f"the whole model is {whole:,} bytes each way")


def make_likes(users: int, items: int, samples: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Pairs of user and item, and whether the user likes the item; one in ten says the opposite of what is expected."""
    random = np.random.default_rng(seed)
    active = random.choice(users, min(users, ACTIVE), replace=False)
    who, what = random.choice(active, samples), random.integers(0, items, samples)
    taste = random.random((KINDS, KINDS)) < 3 / KINDS
    noise = random.random(samples) < 0.1
    liked = taste[who % KINDS, what % KINDS] ^ noise
    return {"user": who.astype("int32"), "item": what.astype("int32")}, liked.astype("float32")[:, None]


def make_model(users: int, items: int, width: int) -> keras.Model:
    user = keras.Input((), dtype="int32", name="user")
    item = keras.Input((), dtype="int32", name="item")
    rows = [
        keras.layers.Embedding(users, width, name="users")(user),
        keras.layers.Embedding(items, width, name="items")(item),
    ]
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()(rows))
    return keras.Model([user, item], keras.layers.Dense(1)(hidden))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=2_000_000)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--width", type=int, default=32, help="numbers in a row")
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="samples of an update")
    parser.add_argument("--whole", dest="embedding_rows", action="store_const", const=False, default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", type=int, default=1, help="as in model.fit: 0 shows no progress bar")
    return parser.parse_args()


if __name__ == "__main__":
    main()
