"""Decides which failed tasks are restarted, and when: in jobs with parameter servers and in elastic jobs. For
`phalanx run --max-restarts`, the same decision about whole jobs."""

from __future__ import annotations

import signal
from collections import defaultdict

from phalanx import errors

DEFAULT_RESTARTS = 10
"""Maximum number of restarts of one task."""
EARLY_FAILURE_S = 5.0
"""A task that runs no longer than this has hardly begun to train, since its imports alone take seconds."""
MAX_EARLY_FAILURES = 7
"""Number of consecutive early failures after which a task is not restarted. A server on a fast machine may be back, and
be killed again, within EARLY_FAILURE_S, and should survive this a few times."""
FIRST_DELAY_S = 0.5
"""Delay before the second restart after consecutive early failures; doubled for each further one."""

_NOT_RESTARTABLE_CODES = {
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
"""Exit codes of tasks that would fail again, or must not be restarted here."""


class RestartPolicy:
    """Counts a job's restarts.

    A task is restarted if it was killed by a signal (memory ran out, its host took a core away, a user killed it), and
    also if the others excluded it or continue without it. In a job with servers, a task that exited with its own error
    would fail again. In an elastic job, its host may have caused the error, so it is restarted; code 0 is a loss if
    others still train.

    Args:
        allowed: Maximum number of restarts of each task; 0 for none.
    """

    def __init__(self, allowed: int, *, elastic: bool = False):
        self._allowed = allowed
        self._elastic = elastic
        self._restarts: dict[int, int] = defaultdict(int)  # by rank
        self._early_failures: dict[int, int] = defaultdict(int)  # in a row

    def delay_s(
        self, rank: int, returncode: int | None, uptime_s: float, *, others_continue: bool = False
    ) -> float | None:
        """Seconds to wait before this task is restarted; None if it is not. A delay counts as a restart.

        Args:
            returncode: See `WorkerExit`.
            uptime_s: Seconds since its process was started.
            others_continue: Whether the others continue without it.
        """
        killed = returncode is not None and returncode < 0 and returncode != -signal.SIGINT  # SIGINT is deliberate
        restartable = (
            killed or returncode == errors.EvictedError.exit_code or (others_continue and returncode is not None)
        )
        if self._elastic and returncode not in (None, 0):
            restartable = returncode not in _NOT_RESTARTABLE_CODES
        if not restartable or self._restarts[rank] >= self._allowed:
            return None
        self._early_failures[rank] = short = self._early_failures[rank] + 1 if uptime_s < EARLY_FAILURE_S else 0
        if short >= MAX_EARLY_FAILURES:
            return None
        self._restarts[rank] += 1
        return FIRST_DELAY_S * 2 ** (short - 2) if short > 1 else 0.0

    def describe(self, rank: int) -> str:
        """The number of the current restart and the maximum, for messages."""
        return f"{self._restarts[rank]} of {self._allowed}"
