"""Broadcasts of the chief to the other workers, through the head."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.parameter_server.server.worker_membership import WorkerMembership
from phalanx.parameter_server.server_protocol import CHIEF_WORKER

Array = np.ndarray[Any, Any]


class ChiefBroadcasts:
    """The newest broadcast of each subject. Each worker's thread uses it; protected by the membership's lock."""

    def __init__(self, members: WorkerMembership):
        self._members = members
        self._broadcasts: dict[str, tuple[int, list[Array]]] = {}  # by subject: first `fit`, and arrays

    def broadcast(self, subject: str, fit: int, arrays: list[Array], *, keep_first: bool) -> list[Array]:
        """Store the chief's arrays. Returns those in effect; with `keep_first`, the ones broadcast first."""
        with self._members.changed:
            if not (keep_first and subject in self._broadcasts):
                self._broadcasts[subject] = (fit, arrays)
                self._members.changed.notify_all()
            return self._broadcasts[subject][1]

    def wait_for_broadcast(self, subject: str, fit: int) -> list[Array] | None:
        """The chief's arrays for `fit` or a later one; None if the chief leaves without broadcasting any."""
        members = self._members
        with members.changed:
            until = members.clock() + members.start_timeout_s
            while subject not in self._broadcasts or self._broadcasts[subject][0] < fit:
                if members.has_chief_left:
                    return None
                members.wait_for_chief(until, lambda: f"{members.names[CHIEF_WORKER]} did not broadcast its {subject}")
            return self._broadcasts[subject][1]
