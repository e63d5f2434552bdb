"""`experimental_set_strategy` enters a scope until the next call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import phalanx
from phalanx.errors import ConfigurationError


def test_a_strategy_is_current_until_the_next_call() -> None:
    one, other = phalanx.OneDeviceStrategy(), phalanx.OneDeviceStrategy()
    try:
        phalanx.experimental_set_strategy(one)
        assert phalanx.get_strategy() is one
        phalanx.experimental_set_strategy(other)
        assert phalanx.get_strategy() is other
    finally:
        phalanx.experimental_set_strategy(None)
    assert not phalanx.has_strategy()
    with one.scope(), pytest.raises(ConfigurationError, match="Call it outside"):
        phalanx.experimental_set_strategy(other)


def test_each_thread_has_its_own() -> None:
    strategy = phalanx.OneDeviceStrategy()
    with ThreadPoolExecutor(1) as elsewhere:
        phalanx.experimental_set_strategy(strategy)
        try:
            elsewhere.submit(phalanx.experimental_set_strategy, None).result()
            assert phalanx.get_strategy() is strategy
        finally:
            phalanx.experimental_set_strategy(None)
    assert not phalanx.has_strategy()


def test_options_of_run_are_accepted() -> None:
    options = phalanx.RunOptions(experimental_xla_options=phalanx.tpu.XLAOptions())
    assert phalanx.OneDeviceStrategy().run(lambda x: x + 1, args=(1,), options=options) == 2
