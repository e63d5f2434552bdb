"""The orders in which samples are visited are those of Keras itself."""

from __future__ import annotations

import pytest

from tests.support.programs import check_python

pytestmark = pytest.mark.tensorflow

PROGRAM = """
import sys

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from phalanx.keras_compat.data_adapters import shuffled_orders

SAMPLES, BATCH = 103, 10
shuffle = {"all": True, "batch": "batch"}[sys.argv[1]]


def of_keras(passes):
    epochs = TFEpochIterator(
        x=np.arange(SAMPLES), batch_size=BATCH, shuffle=shuffle, distribute_strategy=tf.distribute.get_strategy()
    )
    orders = []
    for _ in range(passes):
        batches = []
        with epochs.catch_stop_iteration():
            for _, _, iterator in epochs:
                batches.append(np.ravel(next(iterator)))
        orders.append(np.concatenate(batches))
    return orders


def ours(passes):
    orders = shuffled_orders(SAMPLES, BATCH, shuffle, reads_ahead=False)
    return [next(orders) for _ in range(passes)]


first, second = ours(2)
assert sorted(first) == sorted(second) == list(range(SAMPLES))
assert not np.array_equal(first, second), "without a seed each pass has an order of its own"
for seed in (keras.utils.set_random_seed, tf.random.set_seed):
    seed(3)
    expected = of_keras(3)
    seed(3)
    np.testing.assert_array_equal(ours(3), expected)
"""


@pytest.mark.parametrize("shuffle", ["all", "batch"])
def test_on_tensorflow_with_a_seed_and_without(shuffle: str) -> None:
    check_python("-c", PROGRAM, shuffle, backend="tensorflow")
