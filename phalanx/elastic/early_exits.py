"""Detects processes that leave an elastic job before its end although their exit code is 0. Pure bookkeeping.

For the others, a process that exits in the middle of an entry (`os._exit(0)`, or `sys.exit(0)` in a signal handler) is
lost, like one that was killed. A process that has done its part of the entry has finished, even if others have not:
each may be some milliseconds ahead, and the chief saves the model last.
"""

from __future__ import annotations

from phalanx.cluster.membership_messages import EntryLeft
from phalanx.elastic.entry_log import EntryLog
from phalanx.elastic.member_table import ElasticProcess, MemberTable


class EarlyExits:
    """Judges each process at the moment it leaves.

    Args:
        table: Processes of the job.
        entries: Entries that the program has called so far.
    """

    def __init__(self, table: MemberTable, entries: EntryLog):
        self._table = table
        self._entries = entries
        self._judgements: dict[str, bool] = {}  # for the last process of each task, if it is gone

    @property
    def is_training(self) -> bool:
        """Whether members are inside an entry."""
        return bool(self._inside())

    def arrived(self, task: str) -> None:
        """Record a new process of this task: whatever became of the previous one, the task has not finished."""
        self._judgements.pop(task, None)
        if task in self._table.finished_tasks:
            self._table.finished_tasks.remove(task)

    def entry_left(self, process: ElasticProcess, message: EntryLeft) -> None:
        """Record that a process no longer takes part in an entry."""
        process.left_entries = max(process.left_entries, message.entry + 1)
        if message.is_finished:
            process.finished_entries = max(process.finished_entries, message.entry + 1)

    def is_early(self, incarnation: str) -> bool:
        """Whether the others would miss this process if it left now."""
        running = self._entries.running
        has_finished = running is None or self._table.processes[incarnation].finished_entries > running
        return not has_finished and any(other != incarnation for other in self._inside())

    def left(self, incarnation: str) -> None:
        """Judge a process that has left or is lost, before it is removed from the table."""
        self._judgements[self._table.processes[incarnation].task] = self.is_early(incarnation)

    def dismissed(self, task: str) -> None:
        """Record that the process of this task was dismissed."""
        self._judgements[task] = False

    def has_left_early(self, task: str) -> bool:
        """Whether the last process of this task, whose exit the launcher has observed, left before the end."""
        if task in self._judgements:
            return self._judgements[task]
        # Its link is still open (inherited by a child process), or it exited before it arrived.
        processes = self._table.of_task(task)
        return any(map(self.is_early, processes)) if processes else self.is_training

    def _inside(self) -> list[str]:
        """Members inside the running entry."""
        running = self._entries.running
        if running is None:
            return []
        return [i for i in self._table.members if self._table.processes[i].left_entries <= running]
