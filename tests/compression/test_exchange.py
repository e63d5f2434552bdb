"""What a replica remembers between exchanges: saved, loaded, and as before after an exchange that fails."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest

from phalanx.cluster.membership import Membership
from phalanx.collectives import connect
from phalanx.compression import TopK
from phalanx.errors import ConfigurationError, PeerLostError
from phalanx.strategies import local_sgd_strategy
from phalanx.strategies.local_sgd_strategy import DiLoCoStrategy, LocalSGDStrategy
from phalanx.training.replica import Replica
from phalanx.training.steps.outer_optimizer import AVERAGE, OuterSGD
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


def test_an_exchange_goes_on_from_what_was_pooled() -> None:
    """On one rank, whose pooled state is all of it."""

    def body(replica: Replica) -> bool:
        straight, saved = (WeightExchange(OuterSGD(), TopK(0.1)) for _ in range(2))
        for exchange in (straight, saved):
            exchange.begin(values(0, 0), 1)
        for step in range(1, 4):
            straight.record_step(5)
            expected = straight.run(values(0, step), replica, overlap=False)
            state = {name: np.array(array) for name, array in saved.combined_state(replica.communicator).items()}
            saved = WeightExchange(OuterSGD(), TopK(0.1))
            saved.load_combined(state, 1)
            saved.record_step(5)
            found = saved.run(values(0, step), replica, overlap=False)
            if any(a.tobytes() != b.tobytes() for a, b in zip(expected, found, strict=True)):
                return False
        return True

    assert on_ranks(body, 1) == [True]


class LosesAPeer(Replica):
    def all_reduce(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PeerLostError("lost", rank=1, task="worker/1", host="")


def test_an_exchange_that_fails_may_be_repeated() -> None:
    def body(replica: Replica) -> bool:
        straight, repeated = (WeightExchange(OuterSGD()) for _ in range(2))
        found = []
        for exchange in (straight, repeated):
            exchange.begin(values(0, 0), 1)
            exchange.record_step(5)
            exchange.run(values(replica.rank, 1), replica, overlap=False)
            exchange.record_step(replica.rank + 1)
            if exchange is repeated:
                with pytest.raises(PeerLostError):
                    exchange.run(values(replica.rank, 2), LosesAPeer(replica.communicator), overlap=False)
            found.append(exchange.run(values(replica.rank, 2), replica, overlap=False))
        return all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))

    assert on_ranks(body) == [True, True]


def test_progress_counts_by_samples() -> None:
    """Rank 0 with 3 samples, rank 1 with 1; and without any samples, no rank moves."""

    def body(replica: Replica) -> tuple[Any, Any]:
        exchange = WeightExchange(AVERAGE)
        exchange.begin(values(0, 0), 1)
        exchange.record_step(3 if replica.rank == 0 else 1)
        merged = exchange.run(values(replica.rank, 1), replica, overlap=False)
        exchange.record_step(0)
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


def test_sgd_of_keras_is_an_outer_optimizer() -> None:
    import keras

    outer = local_sgd_strategy._outer(keras.optimizers.SGD(0.5, momentum=0.25))
    assert outer == OuterSGD(0.5, 0.25, nesterov=False)

    class Other(keras.optimizers.SGD):  # type: ignore[misc]
        """May update in another way."""

    with pytest.raises(ConfigurationError, match="OuterSGD"):
        local_sgd_strategy._outer(Other(0.5))


@pytest.mark.parametrize("wrong", ["sgd", OuterSGD, 0.7])
def test_a_wrong_outer_optimizer_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="OuterSGD"):
        DiLoCoStrategy(5, wrong)


def test_wrong_rates_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        OuterSGD(0.0)
    with pytest.raises(ConfigurationError):
        OuterSGD(0.7, 1.0)
