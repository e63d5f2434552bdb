"""What a replica remembers between exchanges: saved, loaded, and unchanged by an exchange that fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phalanx.cluster.membership import Membership
from phalanx.collectives import connect
from phalanx.compression import TopK
from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.strategies.local_sgd_strategy import DiLoCoStrategy, LocalSGDStrategy
from phalanx.training.replica import Replica
from phalanx.training.steps.outer_optimizer import AverageOuterOptimizer, OuterSGD
from phalanx.training.steps.weight_exchange import WeightExchange
from tests.support.processes import run_threads


def values(rank: int, step: int) -> list[Any]:
    random = np.random.default_rng([rank, step])
    return [random.standard_normal((40, 50)).astype(np.float32), random.standard_normal(7).astype(np.float32)]


def on_ranks(function: Any, world_size: int = 2) -> list[Any]:
    def body(membership: Membership) -> Any:
        with connect(membership) as communicator:
            return function(Replica(communicator))

    return run_threads(body, world_size)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_exchange_goes_on_from_what_was_saved(overlap: bool) -> None:
    def body(replica: Replica) -> bool:
        straight = WeightExchange(OuterSGD(), TopK(0.1))
        saved = WeightExchange(OuterSGD(), TopK(0.1))
        for exchange in (straight, saved):
            exchange.begin(values(0, 0), 1)
        for step in range(1, 4):
            straight.took_step(replica.rank + 1)
            saved.took_step(replica.rank + 1)
            expected = straight.run(values(replica.rank, step), replica, overlap=overlap)
            state = {name: np.array(array) for name, array in saved.state().items()}
            saved = WeightExchange(OuterSGD(), TopK(0.1))
            saved.load(state)
            found = saved.run(values(replica.rank, step), replica, overlap=overlap)
            if any(a.tobytes() != b.tobytes() for a, b in zip(expected, found, strict=True)):
                return False
        for exchange in (straight, saved):
            exchange.state()  # waits for what is on its way
        return True

    assert on_ranks(body) == [True, True]


def test_an_exchange_that_fails_changes_nothing() -> None:
    def body(replica: Replica) -> bool:
        exchange = WeightExchange(OuterSGD())
        exchange.begin(values(0, 0), 1)
        exchange.took_step(5)
        exchange.run(values(replica.rank, 1), replica, overlap=False)
        exchange.took_step(5)
        before = exchange.state()
        replica.communicator.close()
        with pytest.raises(PhalanxError):
            exchange.run(values(replica.rank, 2), replica, overlap=False)
        after = exchange.state()
        return before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)

    assert on_ranks(body) == [True, True]


def test_progress_counts_by_samples() -> None:
    """Rank 0 with 3 samples, rank 1 with 1; and without any samples, no rank moves."""

    def body(replica: Replica) -> tuple[Any, Any]:
        exchange = WeightExchange(AverageOuterOptimizer())
        exchange.begin(values(0, 0), 1)
        exchange.took_step(3 if replica.rank == 0 else 1)
        merged = exchange.run(values(replica.rank, 1), replica, overlap=False)
        exchange.took_step(0)
        return merged, exchange.run(merged, replica, overlap=False)

    for merged, again in on_ranks(body):
        for index, array in enumerate(merged):
            expected = 0.75 * values(0, 1)[index] + 0.25 * values(1, 1)[index]
            np.testing.assert_allclose(array, expected, atol=1e-5)
            np.testing.assert_array_equal(array, again[index])


def test_an_outer_step_is_that_of_keras() -> None:
    import keras

    weight = keras.Variable(np.ones(3, np.float32))
    optimizer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    optimizer.build([weight])
    anchor, velocity = [np.ones(3, np.float32)], []
    for step in range(3):
        progress = np.random.default_rng(step).standard_normal(3).astype(np.float32)
        optimizer.apply([keras.ops.convert_to_tensor(progress)], [weight])
        anchor, velocity = OuterSGD().step(anchor, [progress], velocity)
        np.testing.assert_allclose(anchor[0], keras.ops.convert_to_numpy(weight.value), rtol=1e-5)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "5"])
def test_a_wrong_number_of_steps_is_refused_before_anybody_is_waited_for(steps: Any) -> None:
    for strategy in (LocalSGDStrategy, DiLoCoStrategy):
        with pytest.raises(ConfigurationError, match="sync_every"):
            strategy(steps)


@pytest.mark.parametrize("wrong", ["sgd", OuterSGD, 0.7])
def test_a_wrong_outer_optimizer_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="OuterSGD"):
        DiLoCoStrategy(5, wrong)


def test_wrong_rates_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        OuterSGD(0.0)
    with pytest.raises(ConfigurationError):
        OuterSGD(0.7, 1.0)
