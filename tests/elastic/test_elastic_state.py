"""`phalanx.elastic.State` in one process: what it goes back to."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from phalanx.errors import ConfigurationError
from phalanx.strategies.elastic_state import State


def model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def step(net: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    gradients = [keras.ops.ones(v.shape, v.dtype) for v in net.trainable_variables]
    optimizer.apply(gradients, net.trainable_variables)


def test_optimizers_that_were_not_built_go_back_as_well() -> None:
    net, own = model(), keras.optimizers.SGD(0.1, momentum=0.9)
    net.compile(keras.optimizers.Adam(), "mse")
    state = State(model=net, optimizer=own, step=0)
    before = net.get_weights()
    step(net, own)
    step(net, net.optimizer)
    state.step = 1
    state.restore()
    assert state.step == 0
    for old, new in zip(before, net.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    for optimizer in (own, net.optimizer):
        assert int(optimizer.iterations) == 0
        momenta = [v for v in optimizer.variables if "moment" in v.path]
        assert momenta
        assert not any(np.any(keras.ops.convert_to_numpy(v)) for v in momenta)


def test_variables_made_after_the_commit_are_an_error() -> None:
    own = keras.optimizers.SGD(0.1, momentum=0.9)
    net = model()
    state = State(optimizer=own)
    step(net, own)
    with pytest.raises(ConfigurationError, match="was created after the last commit"):
        state.restore()
    with pytest.raises(ConfigurationError, match="'step' is a object"):
        State(step=object())


def test_what_is_not_built_cannot_be_given_to_others() -> None:
    State(model=model())._check_built()
    with pytest.raises(ConfigurationError, match=r"has no variables yet.*build\(shape\)"):
        State(model=keras.Sequential([keras.layers.Dense(1)]))._check_built()
    with pytest.raises(ConfigurationError, match=r"build\(model.trainable_variables\)"):
        State(optimizer=keras.optimizers.SGD())._check_built()
