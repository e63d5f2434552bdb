"""Keras's progress bar for several replicas."""

from __future__ import annotations

import time

from keras.callbacks import CallbackList, ProgbarLogger


class ReplicaProgbar(ProgbarLogger):  # type: ignore[misc]
    """Keras's progress bar, with the number of replicas and the samples per second of all of them.

    Attributes:
        replicas: Current number of replicas.
        devices: Number of devices of one program; None if the replicas have separate programs.
    """

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.replicas = replicas
        self.devices: int | None = None
        self._samples = 0
        self._start = time.perf_counter()

    def _reset_progbar(self) -> None:
        super()._reset_progbar()
        self._samples = 0
        self._start = time.perf_counter()

    def count(self, samples: int) -> None:
        """Add samples that all replicas have processed."""
        self._samples += samples
        if self.progbar is not None:
            rate = self._samples / max(time.perf_counter() - self._start, 1e-9)
            count, noun = (self.replicas, "replica") if self.devices is None else (self.devices, "device")
            workers = f"{count} {noun}{'' if count == 1 else 's'}"
            self.progbar.unit_name = f"step - {workers} - {_short(rate)} samples/s"


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def progress_bar(callbacks: CallbackList, replicas: int | None = None) -> ReplicaProgbar | None:
    """Return the bar that counts samples, if this rank shows one, and set its number of replicas if given."""
    bar = getattr(callbacks, "_progbar", None)
    if not isinstance(bar, ReplicaProgbar):
        return None
    bar.replicas = bar.replicas if replicas is None else replicas
    return bar
