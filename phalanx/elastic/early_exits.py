"""Which processes of an elastic job leave it before its end, although their exit code is 0. Pure bookkeeping.

A process that ends in the middle of an entry (`os._exit(0)`, or `sys.exit(0)` in a signal handler) is lost for the
others like one that was killed. One that has done its part of the entry has finished, even if others still do theirs:
each may be some milliseconds ahead, and a chief saves the model last.
"""

from __future__ import annotations

from phalanx.cluster.membership_messages import EntryLeft
from phalanx.elastic.entry_results import EntryLog
from phalanx.elastic.member_table import ElasticProcess, MemberTable


class EarlyExits:
    """Judges each process in the moment in which it leaves.

    Args:
        table: the processes of the job.
        entries: what the program has called so far.
    """

    def __init__(self, table: MemberTable, entries: EntryLog):
        self._table = table
        self._entries = entries
        self._judgements: dict[str, bool] = {}  # of the last process of each task, if it is gone

    @property
    def is_training(self) -> bool:
        """Whether members are inside an entry."""
        return bool(self._inside())

    def arrived(self, task: str) -> None:
        """A process of this task has arrived: whatever became of the one before, the task has not finished."""
        self._judgements.pop(task, None)
        if task in self._table.finished_tasks:
            self._table.finished_tasks.remove(task)

    def entry_left(self, process: ElasticProcess, message: EntryLeft) -> None:
        """A process takes part in an entry no longer."""
        process.left_entries = max(process.left_entries, message.entry + 1)
        if message.is_finished:
            process.finished_entries = max(process.finished_entries, message.entry + 1)

    def is_early(self, incarnation: str) -> bool:
        """Whether the others would miss this process if it left now."""
        running = self._entries.running
        has_finished = running is None or self._table.processes[incarnation].finished_entries > running
        return not has_finished and any(other != incarnation for other in self._inside())

    def left(self, incarnation: str) -> None:
        """This process is about to be removed from the table: it has left, or is lost."""
        self._judgements[self._table.processes[incarnation].task] = self.is_early(incarnation)

    def dismissed(self, task: str) -> None:
        """The process of this task was told to exit."""
        self._judgements[task] = False

    def has_left_early(self, task: str) -> bool:
        """Whether the last process of this task, whose exit the launcher has seen, left before the end."""
        if task in self._judgements:
            return self._judgements[task]
        # Its link is still open (a child process has inherited it), or it ended before it arrived.
        processes = self._table.of_task(task)
        return any(map(self.is_early, processes)) if processes else self.is_training

    def _inside(self) -> list[str]:
        """The members inside the running entry."""
        running = self._entries.running
        if running is None:
            return []
        return [i for i in self._table.members if self._table.processes[i].left_entries <= running]
