"""`OneDeviceStrategy`, and the strategy that stands in where none was chosen: one replica, nothing to merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from phalanx.config.environment import process_environment
from phalanx.devices.gpu_assignment import check_devices, keras_device
from phalanx.devices.gpu_count import count_gpus
from phalanx.errors import ConfigurationError
from phalanx.strategies.strategy import Strategy
from phalanx.training.replica import alone
from phalanx.training.training_policy import TrainingPolicy, on_device


class OneDeviceStrategy(Strategy):
    """One replica, on one device (`tf.distribute.OneDeviceStrategy`). `fit` is Keras's own; the interface lets the same
    program run with and without replicas.

    Args:
        device: Such as "/gpu:0" or "cpu:1". What is made in the scope lies there, and what is called in `run` or by
            `fit` computes there. None: where the backend computes by default.

    Raises: ConfigurationError if there is no such device.
    """

    def __init__(self, device: str | None = None):
        name = None
        if device is not None:
            check_devices([device], count_gpus(process_environment()))
            name = keras_device(device)
            try:
                with keras.device(name):
                    keras.ops.zeros(())
            except Exception as error:  # of the backend's own kind
                raise ConfigurationError(
                    f"OneDeviceStrategy({device!r}): {keras.backend.backend()} has no device {name} ({error})."
                ) from error
        super().__init__(alone(), policy=TrainingPolicy(device=name))
        self._device = device

    @property
    def local_devices(self) -> tuple[str, ...]:
        return super().local_devices if self._device is None else (self._device,)

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        with on_device(self._policy.device), super().scope():
            yield self

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        with on_device(self._policy.device):
            return super().run(fn, args, kwargs, options)


class DefaultStrategy(OneDeviceStrategy):
    """What `get_strategy()` returns outside of every scope. As in `tf.distribute`, its own scope is outside, too."""

    _is_default = True
