"""Updates variables on TensorFlow, on a parameter server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from phalanx.engines.accelerations import registry
from phalanx.engines.accelerations.tensorflow_fused_adam import fused_adam
from phalanx.engines.replica.tensorflow.direct_calls import DirectCall
from phalanx.engines.updater import BackendUpdater

Array = np.ndarray[Any, Any]


class TensorFlowUpdater(BackendUpdater):
    """See `phalanx.engines.updater.Updater`."""

    def _prepare(self) -> None:
        self._fused = registry.choose("tensorflow_fused_adam", fused_adam, nullcontext)
        # One signature, traced once: finding the trace for the arguments of a call takes longer than the update.
        specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in self.variables]
        step = tf.function(tf.autograph.experimental.do_not_convert(self._update))
        self._step = DirectCall(
            step.get_concrete_function(*specs), *[tf.zeros(spec.shape, spec.dtype) for spec in specs]
        )
        self._values: list[Array] | None = None

    def _update(self, *gradients: Any) -> list[Any]:
        with self._fused(self.optimizer):
            self.optimizer.apply(list(gradients), self.variables)
        return [variable.value.read_value() for variable in self.variables]

    def apply(self, gradients: Sequence[Any]) -> None:
        # No copies: TensorFlow makes one when it updates a variable whose memory is referenced elsewhere.
        self._values = [np.asarray(value) for value in self._step(*map(tf.convert_to_tensor, gradients))]

    def values(self) -> list[Any]:
        if self._values is None:
            self._values = [variable.value.read_value().numpy() for variable in self.variables]
        return self._values

    def load(self, values: Mapping[int, Any], state: Mapping[int, Any]) -> None:
        self._values = None
        for number, value in values.items():
            self.variables[number].assign(value)
        for number, value in state.items():
            self.optimizer.variables[number].assign(value)

    def fetch(self, values: Sequence[int], state: Sequence[int]) -> tuple[list[Any], list[Any]]:
        own = self.optimizer.variables
        return [self.variables[n].value.numpy() for n in values], [own[n].value.numpy() for n in state]
