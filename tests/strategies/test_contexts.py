"""What `tf.distribute` says of contexts and of single values, where there is one replica."""

from __future__ import annotations

import copy
import gc
from collections.abc import Hashable

import keras
import numpy as np

import phalanx
from phalanx.strategies import replica_context


def test_the_scope_of_the_default_strategy_is_outside_of_every_scope() -> None:
    default = phalanx.get_strategy()

    def look() -> tuple[bool, bool, bool, bool]:
        context = phalanx.get_replica_context()
        is_cross = phalanx.in_cross_replica_context()
        return phalanx.get_strategy() is default, phalanx.has_strategy(), is_cross, context is None

    with default.scope():
        assert look() == (True, False, False, False)
        assert default.run(look) == (True, False, False, False)
    with phalanx.OneDeviceStrategy().scope():
        assert phalanx.in_cross_replica_context()
        with default.scope():
            assert look() == (True, False, False, False)
    assert phalanx.get_replica_context().merge_call(lambda strategy: look()) == (True, False, True, True)
    assert look() == (True, False, False, False)


def test_outside_of_every_scope_a_process_reduces_alone() -> None:
    context = phalanx.get_replica_context()
    assert context is not None
    value = {"rows": keras.ops.arange(3), "none": None}
    assert list(keras.ops.convert_to_numpy(context.all_reduce("MAX", value)["rows"])) == [0, 1, 2]
    assert context.all_reduce("SUM", value)["none"] is None
    assert "float" in str(context.all_reduce("MEAN", value)["rows"].dtype)
    assert context.all_gather(keras.ops.ones((2, 5)), axis=1).shape == (2, 5)


def test_a_trace_is_for_one_strategy_also_after_that_is_gone() -> None:
    keys: set[Hashable] = {replica_context.trace_key()}
    for _ in range(20):
        strategy = phalanx.OneDeviceStrategy()
        with strategy.scope():
            keys.add(replica_context.trace_key())
        keys.add(strategy.run(replica_context.trace_key))
        assert strategy.run(replica_context.trace_key) in keys
        del strategy
        gc.collect()
    assert len(keys) == 41


def test_an_object_that_holds_a_strategy_can_be_copied() -> None:
    strategy = phalanx.OneDeviceStrategy()
    assert copy.deepcopy([strategy]) == [strategy] == copy.copy([strategy])
    assert copy.copy(strategy) is strategy


def test_values_are_reduced_along_several_axes() -> None:
    strategy = phalanx.OneDeviceStrategy()
    value = keras.ops.convert_to_tensor(np.arange(24, dtype="float32").reshape(2, 3, 4))
    for axes in ((0, 1), [0, -2], (1,)):
        for op, function in (("SUM", np.sum), ("MEAN", np.mean), ("MAX", np.max)):
            found = keras.ops.convert_to_numpy(strategy.reduce(op, value, axis=axes))
            expected = function(keras.ops.convert_to_numpy(value), axis=tuple(axes))
            np.testing.assert_allclose(found, expected)
    empty = keras.ops.zeros((3, 0, 2), "int32")
    np.testing.assert_array_equal(strategy.reduce("MAX", empty, axis=(1, 2)), [np.iinfo(np.int32).min] * 3)
