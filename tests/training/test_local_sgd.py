"""Local SGD without processes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from phalanx.errors import MembershipChangedError
from phalanx.training.replica import Replica
from phalanx.training.steps.local_sgd import LocalSGDStepper
from phalanx.training.steps.outer_optimizer import AVERAGE
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


@pytest.mark.parametrize("are_inside", [False, True], ids=["one optimizer", "several inside one"])
def test_moving_averages_are_merged_also_if_a_member_is_lost_meanwhile(are_inside: bool) -> None:
    average = SimpleNamespace(value=np.ones(2, np.float32))
    written: dict[int, Any] = {}
    engine: Any = SimpleNamespace(
        read=lambda variables: [variable.value for variable in variables],
        write=lambda pairs: written.update((id(variable), value) for variable, value in pairs),
    )
    optimizer = SimpleNamespace(_learning_rate=None, _model_variables_moving_average=[average])
    if are_inside:
        optimizer = SimpleNamespace(_learning_rate=None, optimizers=[SimpleNamespace(), optimizer])
    communicator: Any = TwoRanks()
    replica = Replica(communicator)
    model, merge = SimpleNamespace(optimizer=optimizer), SimpleNamespace()
    period = SyncPeriod(2, AVERAGE)
    stepper = LocalSGDStepper(model, engine, merge, replica, period, None)  # type: ignore[arg-type]
    stepper._averaged = 8
    replica.retry(stepper._merge_moving_averages)
    np.testing.assert_array_equal(written[id(average)], [2.0, 2.0])


def test_a_checkpoint_of_a_job_that_merged_every_step_is_continued_within_its_epoch() -> None:
    """What the metrics had counted by then is in the checkpoint, on all ranks, and counts once."""
    weight = SimpleNamespace(value=np.ones(2, np.float32))
    counted, starts = [np.array(5.0)], []

    def merged_metrics(share: float, start: Any, **options: Any) -> Any:
        starts.append(start)
        return {"loss": 1.0}

    engine: Any = SimpleNamespace(
        read=lambda variables: [variable.value for variable in variables],
        layer_state=list,
        metric_rules=SimpleNamespace(values=lambda: list(counted)),
        train=lambda data, share: None,
        merged_metrics=merged_metrics,
    )
    optimizer = SimpleNamespace(_learning_rate=None)
    kind = type("Model", (SimpleNamespace,), {"train_step": keras.Model.train_step})
    model = kind(optimizer=optimizer, trainable_variables=[weight])
    merge: Any = SimpleNamespace(in_mode=lambda mode: nullcontext())
    communicator: Any = SimpleNamespace(all_gather=lambda own: [own])
    stepper = LocalSGDStepper(model, engine, merge, Replica(communicator), SyncPeriod(9, AVERAGE), None)
    stepper.load_combined({})
    stepper.begin(has_batch_listeners=False, entering=True)
    stepper._trained = 4  # as if steps had been taken and exchanged
    assert stepper.finish(lambda action: action()) == ()
    assert starts == [[5.0]]
