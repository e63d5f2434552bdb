"""Which tasks are started again after they have failed, and when: in jobs with parameter servers, and in those whose
members come and go. And which jobs, as a whole (`phalanx run --max-restarts`)."""

from __future__ import annotations

import signal
from collections import defaultdict

from phalanx import errors

DEFAULT = 10
"""How often one task is started again."""
SHORT_LIFE_S = 5.0
"""A task that lives no longer than this has hardly come to train: its imports alone take some seconds."""
SHORT_LIVES = 7
"""After so many of those in a row it is given up. A server on a fast machine may be back and be killed again within
SHORT_LIFE_S, and should survive that a few times."""
FIRST_DELAY_S = 0.5
"""Before a second attempt in a row, and twice as long before each further one."""


_HOPELESS = {
    error.exit_code
    for error in (
        errors.ConfigurationError,
        errors.UnsupportedError,
        errors.RendezvousError,
        errors.DisagreementError,
        errors.CollectiveMismatchError,
        errors.PreemptedError,
    )
}
"""A task that ended with one of these would do so again, or is not to be started again by us."""


class RestartPolicy:
    """The memory of a job's restarts.

    A task that was killed by a signal is started again (memory ran out, its host took the core away, somebody killed
    it), and one that the others have left out as it was stopped, or go on without as it does not reach them. With
    servers, one that ended by itself, with an error, would do so again. In an elastic job the error may be its host's,
    so it is tried.

    Args:
        allowed: how often each task may be started again; 0: never.
    """

    def __init__(self, allowed: int, *, elastic: bool = False):
        self._allowed = allowed
        self._elastic = elastic
        self._made: dict[int, int] = defaultdict(int)
        self._short: dict[int, int] = defaultdict(int)

    @property
    def any(self) -> bool:
        return self._allowed > 0

    def delay_s(self, rank: int, returncode: int | None, lived_s: float, *, outlived: bool = False) -> float | None:
        """Seconds to wait before this task is started again; None: it is not.

        Args:
            outlived: whether the others go on without it.
        """
        killed = returncode is not None and returncode < 0 and returncode != -signal.SIGINT  # that asks it to end
        innocent = killed or returncode == errors.EvictedError.exit_code or (outlived and returncode is not None)
        if self._elastic and returncode not in (None, 0):
            innocent = returncode not in _HOPELESS
        if not innocent or self._made[rank] >= self._allowed:
            return None
        self._short[rank] = self._short[rank] + 1 if lived_s < SHORT_LIFE_S else 0
        if self._short[rank] >= SHORT_LIVES:
            return None
        self._made[rank] += 1
        return FIRST_DELAY_S * 2 ** (self._short[rank] - 2) if self._short[rank] > 1 else 0.0

    def describe(self, rank: int) -> str:
        """Which restart this is, for a message."""
        return f"{self._made[rank]} of {self._allowed}"
