"""Many variables as one vector: the same numbers as each by itself, for all optimizers that are updated so."""

from __future__ import annotations

import pytest

from tests.support.backends import slow_after_the_first
from tests.support.programs import check_python

PROGRAM = """
import itertools
import keras
import numpy as np
from phalanx.engines import _backend_class, make_updater
from phalanx.keras_compat.copies.object_config import config_json_of
from phalanx.engines.updater import UpdaterPiece
from phalanx.engines.accelerations.vectorized_updater import ELEMENTWISE, VectorizedUpdater
from phalanx.parameter_server.shard_packing import ShardPacking
from phalanx.arrays.flat_buffer import FlatBuffer

shapes = [(3, 5), (), (7,), (1, 4), (100_000,), (20, 4)]
random = np.random.default_rng(0)


def arrays():
    return [random.normal(size=shape).astype("float32") for shape in shapes]


def made(optimizer, make, starts, ungrouped=()):
    clip = config_json_of(keras.constraints.MinMaxNorm(0.1, 0.2, axis=0))
    pieces = [
        UpdaterPiece(f"v{n}", value.copy(), clip if n == 5 else None, n != 2) for n, value in enumerate(starts)
    ]
    return make(config_json_of(optimizer), pieces, *([ungrouped] if ungrouped else []))


def close(left, right):
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7)


def grouped(updater, arrays):
    lists = [[arrays[n] for n in group] for group in updater.groups]
    return [own[0] if len(own) == 1 else FlatBuffer([array.shape for array in own]).pack(own) for own in lists]


def values(updater):
    return ShardPacking([(shape, np.dtype("float32")) for shape in shapes], updater.groups).unpack(updater.values())


def state(updater):
    return dict(zip(updater.slots, updater.optimizer_values(), strict=True))


schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
optimizers = [getattr(keras.optimizers, name)() for name in sorted(ELEMENTWISE)] + [
    keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, clipvalue=0.3),
    keras.optimizers.AdamW(0.01, weight_decay=0.1, amsgrad=True, use_ema=True, ema_overwrite_frequency=2),
    keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
]
for optimizer in optimizers:
    starts = arrays()
    joined = made(optimizer, make_updater, starts, ungrouped=(1,))
    apart = made(optimizer, _backend_class("Updater"), starts)
    assert isinstance(joined, VectorizedUpdater)
    # One stays apart, one does not decay, one has a constraint; all others are one vector, however large.
    assert sorted(joined.groups) == [(0, 3, 4), (1,), (2,), (5,)]
    assert set(joined.slots) == set(apart.slots) and len(joined.slots) == len(apart.slots)
    for step in range(3):
        if step == 1:
            new = {n: random.normal(size=shapes[n]).astype("float32") for n in (0, 1, 4)}
            for updater in joined, apart:
                updater.set_learning_rate(0.02)
                updater.count(3)
                updater.load(new, {})
        if step == 2 and optimizer in optimizers[-4:]:
            again = made(optimizer, make_updater, values(joined))
            again.load_optimizer([state(joined)[slot] for slot in again.slots])
            joined = again
        gradients = arrays()
        before = [value.copy() for value in joined.values()], joined.values()
        joined.apply(grouped(joined, gradients))
        apart.apply(gradients)
        close(values(joined), apart.values())
        if not joined.shares_buffers:
            close(*before)
        left, right = state(joined), state(apart)
        close([left[slot] for slot in apart.slots], right.values())
        close(joined.fetch([2, 0], [0])[0], apart.fetch([2, 0], [0])[0])

Adam, SGD, Lamb = keras.optimizers.Adam, keras.optimizers.SGD, keras.optimizers.Lamb
for optimizer in Adam(clipnorm=1.0), SGD(global_clipnorm=1.0), Lamb():
    assert not isinstance(made(optimizer, make_updater, arrays()), VectorizedUpdater)
"""


@pytest.mark.parametrize("backend", slow_after_the_first())
def test_a_vector_of_variables_is_updated_as_they_are(backend: str) -> None:
    check_python("-c", PROGRAM, backend=backend, bound_s=300)
