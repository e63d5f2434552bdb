"""Elastic training with TensorFlow. Names and semantics are Horovod's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from phalanx.errors import UnsupportedError
from phalanx.horovod.elastic import ObjectState, State, run
from phalanx.horovod.operation_request import Array
from phalanx.horovod.tensorflow.functions import broadcast_variables


class TensorFlowState(ObjectState):
    """The state of a TensorFlow program: variables, and values by name.

    Args:
        variables: Variables of TensorFlow or Keras. Required, since TensorFlow 2 has no list of all variables.
        session: Must be None, since it belongs to TensorFlow 1.
        kwargs: Values, as in `ObjectState`.

    Raises: UnsupportedError without variables, or with a session.
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any):
        if session is not None or variables is None:
            raise UnsupportedError(
                "TensorFlowState needs `variables=`, for example model.variables, and no session: TensorFlow 2 has "
                "neither sessions nor a list of all variables."
            )
        self.variables = list(variables)
        super().__init__(**kwargs)
        self._snapshot()

    def save(self) -> None:
        """See `State.save`."""
        self._snapshot()
        super().save()

    def restore(self) -> None:
        """See `State.restore`."""
        for variable, array in zip(self.variables, self._saved, strict=True):
            variable.assign(array)
        super().restore()

    def sync(self) -> None:
        """See `State.sync`."""
        broadcast_variables(self.variables, root_rank=0)
        super().sync()
        self._snapshot()

    def _snapshot(self) -> None:
        self._saved: list[Array] = [np.array(variable.numpy()) for variable in self.variables]


def TensorFlowKerasState(model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> Any:
    """Create a `phalanx.horovod.keras.elastic.KerasState`, for Keras on TensorFlow."""
    from phalanx.horovod.keras.elastic import KerasState

    return KerasState(model, optimizer, backend, **kwargs)


__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
