"""The source of the global step of a supervised training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from phalanx.training.model_dispatch import Member
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker


class StepCounter:
    """The global step of one model.

    Args:
        counter: A `keras.Variable`, or a function that returns the step; None: `strategy.global_step` with parameter
            servers, otherwise the optimizer's iterations.
        model: The model that is trained.
        member: This process's membership in the job; None without a strategy.
    """

    def __init__(self, counter: keras.Variable | Callable[[], Any] | None, model: Any, member: Member | None) -> None:
        self._counter = counter
        self._model = model
        self._member = member

    def read(self) -> int:
        """Return the number of steps that the model has trained."""
        counter = self._counter
        if counter is not None:
            value = counter() if callable(counter) and not isinstance(counter, keras.Variable) else counter
            return int(keras.ops.convert_to_numpy(value))
        if isinstance(self._member, ParameterServerWorker):
            return self._member.global_step
        optimizer = getattr(self._model, "optimizer", None)
        return 0 if optimizer is None else int(keras.ops.convert_to_numpy(optimizer.iterations))

    def continue_from(self, step: int) -> None:
        """Set the counters that are not restored with the model."""
        if isinstance(self._counter, keras.Variable):
            self._counter.assign(step)
        if isinstance(self._member, ParameterServerWorker):
            self._member.global_step = max(self._member.global_step, step)
