"""Finds the first report of the end of an epoch: all ranks finish the same epochs, and each reports them.

A task may be some short epochs behind the first. Epochs are therefore compared by *round* first: a new round begins
when a task's epochs restart at a lower number, in another `fit` or after a restart.
"""

from __future__ import annotations

from phalanx.monitoring.worker_figures import FinishedEpoch


class EpochRounds:
    """The epochs that the tasks of a job have reported."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, FinishedEpoch]] = {}  # by task, with its round
        self._newest = (0, -1)  # round and number

    def begin_round(self) -> None:
        """Begin a round because the whole job starts or restarts."""
        self._newest = (self._newest[0] + 1, -1)

    def forget(self, task: str) -> None:
        """Discard the reports of a task that starts a new process."""
        self._last.pop(task, None)

    def is_new(self, task: str, epoch: FinishedEpoch) -> bool:
        """Whether no task has reported this epoch before."""
        former = self._last.get(task)
        if former is not None and former[1] == epoch:
            return False  # reports repeat the last epoch
        number = self._newest[0] if former is None else former[0] + (epoch.epoch <= former[1].epoch)
        self._last[task] = number, epoch
        is_new = (number, epoch.epoch) > self._newest
        if is_new:
            self._newest = number, epoch.epoch
        return is_new
