"""Local SGD without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from phalanx.errors import MembershipChangedError
from phalanx.training.replica import Replica
from phalanx.training.steps.local_sgd import LocalSGDStepper
from phalanx.training.steps.outer_optimizer import AverageOuterOptimizer
from phalanx.training.training_policy import SyncPeriod


class TwoRanks:
    """The other rank has the value 3 and as many samples; a member is lost in the first sum."""

    def __init__(self) -> None:
        self.is_lost = False

    def all_gather(self, own: Any) -> list[Any]:
        return [own, own]

    def all_reduce(self, arrays: list[Any], *, scale: float) -> list[Any]:
        if not self.is_lost:
            self.is_lost = True
            raise MembershipChangedError("lost")
        return [scale * array + 0.5 * 3.0 for array in arrays]


def test_moving_averages_are_merged_also_if_a_member_is_lost_meanwhile() -> None:
    average = SimpleNamespace(value=np.ones(2, np.float32))
    written: dict[int, Any] = {}
    engine: Any = SimpleNamespace(
        read=lambda variables: [variable.value for variable in variables],
        write=lambda pairs: written.update((id(variable), value) for variable, value in pairs),
    )
    optimizer = SimpleNamespace(_learning_rate=None, _model_variables_moving_average=[average])
    communicator: Any = TwoRanks()
    replica = Replica(communicator)
    model, merge = SimpleNamespace(optimizer=optimizer), SimpleNamespace()
    period = SyncPeriod(2, AverageOuterOptimizer())
    stepper = LocalSGDStepper(model, engine, merge, replica, period, None)  # type: ignore[arg-type]
    stepper._averaged = 8
    replica.retry(stepper._merge_moving_averages)
    np.testing.assert_array_equal(written[id(average)], [2.0, 2.0])
