"""Which entries of the program have begun or finished, and their results. Pure bookkeeping.

An *entry* is a call in which all members take part (`fit`, `evaluate`, ...). A program makes its entries one after the
other, so they are numbered. A candidate runs the same program: it receives the results of finished entries, and waits
at the current one until it becomes a member.
"""

from __future__ import annotations

from phalanx.cluster.membership_messages import NOT_KEPT, EntryBegan, EntryFinished, PastEntry
from phalanx.elastic.member_table import ElasticProcess

KEPT_BYTES = 2**30
"""Limit for the results of all entries together: they are kept in the launcher's memory."""
KEPT_STATE_BYTES = 2**28
"""As much for their states, of which the oldest go first: most programs read what the last call has left."""


class EntryLog:
    """The entries so far.

    Attributes:
        current: the highest number of an entry that has begun or is next; -1 before the first one.
    """

    def __init__(self) -> None:
        self.current = -1
        self._notes: dict[int, bytes] = {}  # of entries that have begun
        self._results: dict[int, bytes] = {}  # of those that have finished, or NOT_KEPT
        self._kept = 0  # bytes
        self._states: dict[int, bytes] = {}  # by entry, the oldest first
        self._state_bytes = 0  # of all of them

    def record(self, message: EntryBegan | EntryFinished) -> None:
        """The chief has begun or finished an entry. A new chief may repeat what the former one sent."""
        entry = message.entry
        if isinstance(message, EntryBegan):
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
        """The entry that has begun and that the chief has not finished; None if there is none."""
        return self.current if self.current in self._notes and self.current not in self._results else None

    def answer(self, candidate: ElasticProcess, members: int) -> PastEntry | EntryBegan | None:
        """The answer to a candidate about the entry that it has reached, if there is one now; each is given once.

        Args:
            candidate: its question is removed when it is answered.
            members: the present number of members.
        """
        entry = candidate.queried_entry if candidate.ready_entry is None else candidate.ready_entry
        if entry is None:
            return None
        if entry in self._results:
            candidate.queried_entry = candidate.ready_entry = None
            candidate.finished_entries = entry + 1
            return PastEntry(entry, self._results[entry], self._states.get(entry, b""))
        if candidate.queried_entry is not None and entry in self._notes:
            candidate.queried_entry = None
            return EntryBegan(entry, self._notes[entry], members)
        return None

    def _keep_state(self, entry: int, state: bytes) -> None:
        self._states[entry] = state
        self._state_bytes += len(state)
        while self._state_bytes > KEPT_STATE_BYTES:
            self._state_bytes -= len(self._states.pop(next(iter(self._states))))
