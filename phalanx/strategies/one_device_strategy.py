"""`OneDeviceStrategy`, and the strategy that stands in where none was chosen: one replica, nothing to merge."""

from __future__ import annotations

from phalanx.devices.gpu_assignment import check_devices
from phalanx.strategies.strategy import Strategy
from phalanx.training.replica import alone


class OneDeviceStrategy(Strategy):
    """One replica. `fit` is Keras's own; the interface lets the same program run with and without replicas.

    Args:
        device: for the reader's information, such as "/gpu:0"; the backend's default device computes.
    """

    def __init__(self, device: str = "/cpu:0"):
        check_devices([device])
        super().__init__(alone())
        self._device = device

    @property
    def local_devices(self) -> tuple[str, ...]:
        return (self._device,)


class DefaultStrategy(OneDeviceStrategy):
    """What `get_strategy()` returns outside of every scope."""
