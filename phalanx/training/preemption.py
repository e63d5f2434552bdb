"""How a job is told to end, and how all its ranks come to know it after the same step, at no cost.

A process that gets the signal only makes a note. The note travels with the merge of the next step: one more number
beside the gradients, which every rank gets back as the sum over all. So all know it at the same collective, of a fixed
job and of one whose members change, and nobody asks anybody. The chief's wish to save after the step travels with it,
since what the ranks keep to themselves (error feedback of a compression) is saved as well.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from phalanx.config.job_config import preemption_signals
from phalanx.runtime import progress

Array = np.ndarray[Any, Any]


_SAVE = 65536.0
"""The chief's wish, beside which one is added by each rank that was told to end."""


class PreemptionNotice:
    """That the job is to end, or to be saved: this rank's own word, and what the merges have brought.

    Attributes:
        given: whether a merge has brought the word to end; the same on all ranks after each step.
        wished: whether one has brought the chief's wish to save; whoever saves makes it false.
    """

    def __init__(self) -> None:
        self.given = self.wished = False
        self._told = self._wishes = False
        self._merged = np.zeros(1, np.float32)

    def give(self) -> None:
        """This rank was told to end. May be called by a signal handler."""
        self._told = True

    def wish(self, save: bool) -> None:
        """As the chief: whether to save after the next step."""
        self._wishes = save

    def merge_with(
        self, arrays: Sequence[Array], scale: tuple[float, ...], out: Sequence[Array]
    ) -> tuple[list[Array], tuple[float, ...], list[Array]]:
        """The arguments of an all-reduce, and the notice beside them. Call `take` when it is done."""
        # Not the one of the last step, whose result another rank may still have to be given.
        self._merged = np.zeros(1, np.float32)
        own = np.array([_SAVE * self._wishes + self._told], np.float32)
        return [*arrays, own], (*scale, 1.0), [*out, self._merged]

    def take(self) -> None:
        """The all-reduce is done."""
        wished, told = divmod(float(self._merged[0]), _SAVE)
        self.wished |= bool(wished)
        self.given |= bool(told)
        self._wishes = False


@contextmanager
def heeded(notice: PreemptionNotice) -> Iterator[None]:
    """While inside, the first of the signals of `settings.preemption_signals` gives notice, and the second one means
    what it meant before. In other threads than the main one, which gets no signals, it changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = preemption_signals()
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            signal.signal(number, previous[number] if callable(previous[number]) else signal.SIG_DFL)
            os.kill(os.getpid(), number)
        notice.give()

    for number in numbers:
        signal.signal(number, on_signal)
    progress.heeds_signals(True)
    try:
        yield
    finally:
        progress.heeds_signals(False)
        for restored, handler in previous.items():
            signal.signal(restored, signal.SIG_DFL if handler is None else handler)
