"""A step whose results are left in pinned memory, as on a GPU: JAX's CPUs know such memory too."""

from __future__ import annotations

import pytest

from tests.support.backends import BACKENDS
from tests.support.programs import check_python

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="needs JAX")

PROGRAM = """
import jax, keras, numpy as np
from types import SimpleNamespace
from jax.sharding import SingleDeviceSharding
from phalanx.engines.replica.jax import jax_engine, model_compiler
from tests.support.seeds import set_random_seed

arrived = []


class Merge:
    updates_weights = is_unfused = repeats_steps = uses_micro_batches = once_per_step = synchronizes_batch_norm = False
    gather = global_size = None

    def __call__(self, layout, arrays, share):
        arrived.append(len(arrays))
        flats = layout.allocate()
        for view, array in zip(layout.unpack(flats), arrays, strict=True):
            view[...] = array
        return flats


class Servers(Merge):
    updates_weights = is_unfused = True

    def __init__(self, model):
        self.weights = [np.array(v) for v in model.trainable_variables]

    def __call__(self, layout, arrays, share):
        flats = super().__call__(layout, arrays, share)
        self.weights = [w - 0.1 * g for w, g in zip(self.weights, arrays, strict=False)]
        for view, weight in zip(layout.unpack(flats), self.weights, strict=False):
            view[...] = weight
        return flats


def trained(merge_of):
    set_random_seed(3)
    big = keras.layers.Dense(300, activation="relu")  # its kernel is large for a CPU, small for the bus
    model = keras.Sequential([keras.Input((40,)), big, keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    x, y = np.random.default_rng(0).random((30, 40), np.float32), np.arange(30) % 3
    engine = jax_engine.JaxEngine(model, merge_of(model))
    engine.build((x, y, None))
    engine.begin()
    for _ in range(3):
        engine.train((x, y, None), 1.0)
    logs = {name: float(value) for name, value in engine.logs().items()}
    engine.end()
    return [*model.get_weights(), *logs.values()], arrived[-1]


device = jax.devices()[0]
for merge_of in (lambda model: Merge(), Servers):
    expected, arrays = trained(merge_of)
    model_compiler.pinned_memory = lambda: SingleDeviceSharding(device, memory_kind="pinned_host")
    found, fewer = trained(merge_of)
    model_compiler.pinned_memory = lambda: None
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    print("arrays", arrays, fewer)
"""


def test_steps_compute_the_same_and_small_arrays_travel_as_one() -> None:
    lines = check_python("-c", PROGRAM, backend="jax").splitlines()
    of_merge, of_servers = (line for line in lines if line.startswith("arrays"))
    arrays, fewer = map(int, of_merge.split()[1:])
    assert fewer < arrays
    assert len(set(of_servers.split()[1:])) == 1, "servers are given every gradient by itself"
