"""Preemption: notifies all ranks, after the same step and at no cost, that the job is to stop.

A process that receives the signal only sets a flag. The flag travels with the merge of the next step: one more number
next to the gradients, which every rank receives as the sum over all. So all ranks see it at the same collective, in
fixed and in elastic jobs, without a separate message. The chief's request to save after the step travels with it,
because the local state of the ranks (error feedback of a compression) is saved as well.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from phalanx.config.job_config import preemption_signals
from phalanx.runtime import progress

Array = np.ndarray[Any, Any]


_SAVE = 65536.0
"""The chief's request to save, in the merged number, to which each preempted rank adds 1. Exceeds the rank count."""


class PreemptionNotice:
    """Notice that the job is to stop, or to be saved: this rank's flags, and the results of the merges.

    Attributes:
        is_preempted: Whether a merge has delivered the notice to stop; the same on all ranks after each step.
        is_save_due: Whether a merge has delivered the chief's request to save; the caller that saves clears it.
    """

    def __init__(self) -> None:
        self.is_preempted = self.is_save_due = False
        # `_is_signalled` is set by a signal handler between any two instructions, and never cleared: no lock needed.
        self._is_signalled = self._requests_save = False
        self._merged = np.zeros(1, np.float32)

    def signal(self) -> None:
        """Record that this rank received the signal to stop. May be called by a signal handler."""
        self._is_signalled = True

    def request_save(self, requested: bool) -> None:
        """As the chief, set whether to save after the next step."""
        self._requests_save = requested

    def add_to_merge(
        self, arrays: Sequence[Array], scale: tuple[float, ...], out: Sequence[Array]
    ) -> tuple[list[Array], tuple[float, ...], list[Array]]:
        """Return the arguments of an all-reduce with the notice added. Call `read_merge` when it is done."""
        # A new array: another rank may still be receiving the result of the last step from the old one.
        self._merged = np.zeros(1, np.float32)
        own = np.array([_SAVE * self._requests_save + self._is_signalled], np.float32)
        # Scale 1, because it is a count of ranks, not a mean by shares.
        return [*arrays, own], (*scale, 1.0), [*out, self._merged]

    def read_merge(self) -> None:
        """Read the notice from the completed all-reduce."""
        # Exact: float32 represents all integers up to 2**24.
        saves, preempted = divmod(float(self._merged[0]), _SAVE)
        self.is_save_due |= bool(saves)
        self.is_preempted |= bool(preempted)
        self._requests_save = False


@contextmanager
def notified_by_signals(notify: Callable[[], None]) -> Iterator[None]:
    """Inside the context, call `notify` at the first of `preemption_signals()`; the second has its previous effect.
    Does nothing outside of the main thread, because other threads get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = preemption_signals()
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            # Sent again under the previous handler, so that it has its usual effect. An ignored signal ends the
            # process: a user who sends a second signal does not want to wait.
            signal.signal(number, previous[number] if callable(previous[number]) else signal.SIG_DFL)
            os.kill(os.getpid(), number)
        notify()

    for number in numbers:
        signal.signal(number, on_signal)
    progress.set_saves_checkpoint(True)
    try:
        yield
    finally:
        progress.set_saves_checkpoint(False)
        for restored, handler in previous.items():
            signal.signal(restored, signal.SIG_DFL if handler is None else handler)
