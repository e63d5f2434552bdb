"""The number of replicas in a trial, when one process computes what several would (`step_probe`, `loss_probe`).

Otherwise, a step that divides by the number of replicas would divide by the same number in one process, and the trial
would not see the effect.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Trials(threading.local):
    """The numbers of replicas in the trials that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.ranks: list[int] = []


_trials = _Trials()


@contextmanager
def simulated_ranks(number: int) -> Iterator[None]:
    """Context in which `number` replicas share a batch."""
    _trials.ranks.append(number)
    try:
        yield
    finally:
        _trials.ranks.pop()


def number_of_simulated_ranks() -> int | None:
    """Return the number set by `simulated_ranks`; None outside of a trial."""
    return _trials.ranks[-1] if _trials.ranks else None
