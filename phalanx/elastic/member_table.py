"""The processes of an elastic job: its candidates, its members, and how many there should be. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.cluster.membership_messages import LossReport, MemberAddress
from phalanx.cluster.task_comparison import TaskDescription, describe_disagreement


@dataclass(frozen=True)
class MembershipLimits:
    """Bounds on the number of members of a job, and on the time that it waits for them.

    Attributes:
        minimum, maximum: Bounds on the number of members.
        expected: Number of members to start with if they arrive in time.
        start_s: Seconds that the job waits for them, and later for the minimum if members are missing.
        timeout_s: Seconds that a member may make no progress while others wait for it.
    """

    minimum: int
    maximum: int
    expected: int
    start_s: float
    timeout_s: float


@dataclass
class ElasticProcess:
    """A process that is a candidate or a member.

    Attributes:
        description: Its own description, sent when it arrived.
        last_message_at: Time of its arrival or last message, in seconds of a monotonic clock.
        queried_entry: The entry whose status it waits for, as a candidate.
        ready_entry: The entry at which it waits to become a member.
        report: Its report on leaving the current generation.
        joined_late: Whether it became a member after the job had begun.
        left_entries, finished_entries: Number of entries that are over for it, and of those in which it did its part.
    """

    description: TaskDescription
    last_message_at: float
    queried_entry: int | None = None
    ready_entry: int | None = None
    report: LossReport | None = None
    joined_late: bool = False
    left_entries: int = 0
    finished_entries: int = 0

    @property
    def task(self) -> str:
        return self.description.task

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for an answer from the coordinator."""
        return self.queried_entry is not None or self.ready_entry is not None

    @property
    def needs_state(self) -> bool:
        """Whether it has reported that it still needs the job's state."""
        return self.report is not None and self.report.needs_state


class MemberTable:
    """All processes of the job, and which of them are members.

    Attributes:
        processes: Candidates and members, by incarnation, in order of arrival.
        members: Incarnations of the members, in rank order.
        withdrawn: Tasks whose host is withdrawn: their processes leave as soon as others have the job's state.
        finished_tasks: Tasks of members that have finished their program.
        limits: Bounds on the number of members.
        process_limit: Number of processes that will ever be started; None if unknown.
    """

    def __init__(self, limits: MembershipLimits) -> None:
        self.limits = limits
        self.process_limit: int | None = None
        self.finished_tasks: list[str] = []
        self.processes: dict[str, ElasticProcess] = {}
        self.members: list[str] = []
        self.withdrawn: set[str] = set()

    def disagreement(self, description: TaskDescription) -> str | None:
        """Reason that this process cannot take part; None if it can."""
        known = next(iter(self.processes.values()), None)
        return None if known is None else describe_disagreement(known.description, description)

    def add(self, description: TaskDescription, now: float) -> None:
        self.processes[description.incarnation] = ElasticProcess(description, now)

    def remove(self, incarnation: str) -> ElasticProcess:
        if incarnation in self.members:
            self.members.remove(incarnation)
        return self.processes.pop(incarnation)

    def of_task(self, task: str) -> list[str]:
        """Incarnations of a task's processes."""
        return [incarnation for incarnation, process in self.processes.items() if process.task == task]

    def is_withdrawn(self, incarnation: str) -> bool:
        return self.processes[incarnation].task in self.withdrawn

    def candidates(self, entry: int) -> list[str]:
        """Candidates that could become members at this entry, in order of arrival."""
        return [i for i, p in self.processes.items() if p.ready_entry == entry and i not in self.members]

    @property
    def reports(self) -> dict[str, LossReport]:
        """Reports of the members that have left the current generation."""
        return {i: report for i in self.members if (report := self.processes[i].report) is not None}

    @property
    def unreported(self) -> list[str]:
        return [i for i in self.members if self.processes[i].report is None]

    @property
    def min_members(self) -> int:
        """Number of members below which the job waits; 1 once some have finished, as the others then only follow."""
        return 1 if self.finished_tasks else self.limits.minimum

    @property
    def initial_members(self) -> int:
        """Number of members with which the job begins without further waiting."""
        limits, possible = self.limits, self.process_limit
        return limits.expected if possible is None else max(limits.minimum, min(limits.expected, possible))

    @property
    def vacancies(self) -> int:
        """Number of candidates that can become members. Withdrawn members leave soon and do not count."""
        return max(0, self.limits.maximum - sum(not self.is_withdrawn(i) for i in self.members))

    @property
    def surplus(self) -> list[str]:
        """Members that should leave: withdrawn ones, then those with the highest ranks.

        One member that has the job's state always stays, or the state would be lost.
        """
        leaving = [i for i in self.members if self.is_withdrawn(i)]
        staying = [i for i in self.members if i not in leaving]
        if all(self.processes[i].needs_state for i in staying):
            informed = next((i for i in leaving if not self.processes[i].needs_state), None)
            if informed is not None:
                staying.insert(0, informed)
                leaving.remove(informed)
        return leaving + staying[self.limits.maximum :]

    def set_members(self, incarnations: Iterable[str], *, is_first: bool) -> list[MemberAddress]:
        """Make these processes the members, in this rank order, and return their addresses.

        Args:
            incarnations: Incarnations of the new members.
            is_first: Whether this is the first generation, where no member needs the job's state.
        """
        addresses = []
        self.members = list(incarnations)
        for incarnation in self.members:
            process = self.processes[incarnation]
            report = process.report
            needs_state = report.needs_state if report else not is_first
            completed = report.completed if report else -1
            process.joined_late |= report is None and not is_first
            addresses.append(
                MemberAddress.of(process.description, completed, needs_state=needs_state, is_late=process.joined_late)
            )
            process.report = process.ready_entry = process.queried_entry = None  # all belong to the last generation
        return addresses
