"""The entries of the program that have begun or finished, and their results. Pure bookkeeping.

An *entry* is a call in which all members take part (`fit`, `evaluate`, ...). A program makes its entries sequentially,
so they are numbered. A candidate runs the same program: it receives the results of finished entries, and waits at the
current one until it becomes a member.
"""

from __future__ import annotations

from phalanx.cluster.membership_messages import NOT_KEPT, EntryAlreadyFinished, EntryFinished, EntryStarted
from phalanx.elastic.member_table import ElasticProcess

KEPT_BYTES = 2**30
"""Limit for the total size of the results of all entries, which are kept in the launcher's memory."""
KEPT_STATE_BYTES = 2**28
"""Limit for the total size of their states. The oldest are dropped first, as most programs only read the last one."""


class EntryLog:
    """The entries so far.

    Attributes:
        current: Highest number of an entry that has begun or is next; -1 before the first one.
    """

    def __init__(self) -> None:
        self.current = -1
        self._notes: dict[int, bytes] = {}  # of entries that have begun
        self._results: dict[int, bytes] = {}  # of finished entries, or NOT_KEPT
        self._kept = 0  # bytes
        self._states: dict[int, bytes] = {}  # by entry, the oldest first
        self._state_bytes = 0  # total size

    def record(self, message: EntryStarted | EntryFinished) -> None:
        """Record that the chief has begun or finished an entry. A new chief may repeat messages of the previous one."""
        entry = message.entry
        if isinstance(message, EntryStarted):
            self.current = max(self.current, entry)
            self._notes[entry] = message.note
            return
        self.current = max(self.current, entry + 1)
        if entry not in self._results:
            fits = self._kept + len(message.result) <= KEPT_BYTES
            self._results[entry] = message.result if fits else NOT_KEPT
            self._kept += len(self._results[entry])
            self._keep_state(entry, message.state)

    @property
    def joinable(self) -> int:
        """The entry at which candidates can become members."""
        return max(self.current, 0)

    @property
    def running(self) -> int | None:
        """The entry that has begun but that the chief has not finished; None if there is none."""
        return self.current if self.current in self._notes and self.current not in self._results else None

    def answer(self, candidate: ElasticProcess, members: int) -> EntryAlreadyFinished | EntryStarted | None:
        """Return the answer to a candidate about the entry that it has reached, if there is one now. Each answer is
        returned once.

        Args:
            candidate: The candidate; its query is removed when it is answered.
            members: Current number of members.
        """
        entry = candidate.queried_entry if candidate.ready_entry is None else candidate.ready_entry
        if entry is None:
            return None
        if entry in self._results:
            candidate.queried_entry = candidate.ready_entry = None
            candidate.finished_entries = entry + 1
            return EntryAlreadyFinished(entry, self._results[entry], self._states.get(entry, b""))
        if candidate.queried_entry is not None and entry in self._notes:
            candidate.queried_entry = None
            return EntryStarted(entry, self._notes[entry], members)
        return None

    def _keep_state(self, entry: int, state: bytes) -> None:
        self._states[entry] = state
        self._state_bytes += len(state)
        while self._state_bytes > KEPT_STATE_BYTES:
            self._state_bytes -= len(self._states.pop(next(iter(self._states))))
