"""`OneDeviceStrategy`, and the default strategy: one replica, nothing to merge."""

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
from phalanx.training.replica import single_replica
from phalanx.training.training_policy import TrainingPolicy, on_device


class OneDeviceStrategy(Strategy):
    """One replica on one device (`tf.distribute.OneDeviceStrategy`). `fit` is that of Keras; with this interface, the
    same program runs with and without replicas.

    Args:
        device: A device such as "/gpu:0" or "cpu:1". Variables created in the scope are placed on it, and `run` and
            `fit` compute on it. None: the default device of the backend.

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
            except Exception as error:  # its class depends on the backend
                raise ConfigurationError(
                    f"OneDeviceStrategy({device!r}): {keras.backend.backend()} has no device {name} ({error})."
                ) from error
        super().__init__(single_replica(), policy=TrainingPolicy(device=name))
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
    """The strategy that `get_strategy()` returns outside any scope. Its own scope counts as none, as in TensorFlow."""

    _is_default = True
