"""The elastic coordinator decides the membership of a job whose members join and leave. It uses no sockets.

A job has one coordinator, in the launcher. It is the only authority: members that are cut off from it cannot continue
on their own, so there are never two chiefs. It tracks *candidates*, which have started but do not take part yet, and
*members*, which form a *generation*.

A member that detects a loss in a collective leaves the generation and reports its position. When every member has
reported or is gone, the coordinator forms the next generation. All members report the same collective, or some are one
ahead and hand over its result to the others (`elastic_group`). Candidates join only if all members are before the merge
of the same training step: only then is the state that they receive (weights, position) the same on all members.

When candidates want to join (or members leave) and nothing fails, the coordinator asks the chief to leave the
generation before the next step, which makes the others report as well. Losing and joining therefore share one path, and
neither costs anything in a normal step.

All losses share one path, too (`ElasticCoordinator.lose`): a closed link, an exit that the launcher observed, a silent
process and an eviction differ only in what is logged and sent.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import replace

from phalanx.cluster import membership_messages as messages
from phalanx.cluster.spec import CHIEF
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.config.task_names import count_workers
from phalanx.elastic.early_exits import EarlyExits
from phalanx.elastic.entry_log import EntryLog
from phalanx.elastic.eviction_policy import EvictionPolicy
from phalanx.elastic.launcher_interface import LauncherActions
from phalanx.elastic.member_table import MembershipLimits, MemberTable
from phalanx.elastic.network_partitions import ConnectionFailures
from phalanx.errors import PeerLostError, PhalanxError, RendezvousError

Send = Callable[[str, messages.FromCoordinator], None]
"""Sends a message to the process of an incarnation."""

_LEAVES = {"evicted": "was evicted", "surplus": "leaves the job"}
"""Log text for a process that is dismissed while the job continues, by cause."""
STUCK = "it made no progress while the others waited for it"
PARTITIONED = "the network between it and other members is cut"
SURPLUS = "fewer workers are requested"
WITHDRAWN = "its host is withdrawn"
FINISHED = "the job has finished"


class CoordinatorState(enum.Enum):
    """Phases of a job, as the coordinator sees them."""

    GATHERING = enum.auto()
    """Waiting for the initial processes of the job."""
    RUNNING = enum.auto()
    """A generation trains."""
    REGROUP_REQUESTED = enum.auto()
    """A generation trains, and its chief has been asked to leave it before the next step."""
    REGROUPING = enum.auto()
    """A generation has ended. Waiting until all its members have reported or are gone."""
    SHORT_OF_MEMBERS = enum.auto()
    """All members have reported, but there are fewer than the minimum. Waiting for candidates."""
    FINISHED = enum.auto()
    """All members have finished."""
    FAILED = enum.auto()
    """The job cannot continue."""


_S = CoordinatorState
TRANSITIONS = {
    _S.GATHERING: {_S.RUNNING, _S.FAILED},
    _S.RUNNING: {_S.REGROUP_REQUESTED, _S.REGROUPING, _S.FINISHED, _S.FAILED},
    # Back to RUNNING when a new size is requested: the pending regroup may no longer be needed.
    _S.REGROUP_REQUESTED: {_S.RUNNING, _S.REGROUPING, _S.FINISHED, _S.FAILED},
    _S.REGROUPING: {_S.RUNNING, _S.SHORT_OF_MEMBERS, _S.FINISHED, _S.FAILED},
    _S.SHORT_OF_MEMBERS: {_S.RUNNING, _S.FINISHED, _S.FAILED},
    _S.FINISHED: set(),
    _S.FAILED: set(),
}


class LossCause(enum.Enum):
    """How the coordinator finds out that a process is lost."""

    LINK_CLOSED = enum.auto()
    PROCESS_ENDED = enum.auto()
    """The launcher observed the exit. The link may still be open if the network or the host's power is cut."""
    REPLACED = enum.auto()
    """Another process of the same task arrived."""
    LEFT_EARLY = enum.auto()
    """Its program ended, perhaps with exit code 0, while others are in an entry that it has not finished."""
    EVICTED = enum.auto()
    """It is silent, stuck or cut off, and is about to be killed."""


class ElasticCoordinator:
    """See the module docstring. All methods take the time in seconds of a monotonic clock.

    Args:
        limits: Bounds on the number of members.
        now: Start time of the job.
        job: Executes the coordinator's decisions in the launcher.
        send: Sends a message to a process.

    Attributes:
        state: Current state of the job.
        generation: Number of the last generation; 0 before the first one.
        failure: Reason for the failure of the job; empty if it has not failed.
        table: Processes of the job.
        entries: Entries that the program has called so far.
        early_exits: Processes that left before the end.
    """

    def __init__(self, limits: MembershipLimits, now: float, *, job: LauncherActions, send: Send):
        self.state = CoordinatorState.GATHERING
        self.generation = 0
        self.failure = ""
        self.table = MemberTable(limits)
        self.entries = EntryLog()
        self.early_exits = EarlyExits(self.table, self.entries)
        self._is_training = False  # as last reported to the launcher
        self._job = job
        self._send = send
        self._connections = ConnectionFailures()
        self._evictions = EvictionPolicy(limits.timeout_s, now)
        self._state_since = now
        # The chief of the current generation, and whether it was lost and not replaced yet.
        self._chief, self._is_chief_lost = "", False
        # Incarnations whose exit the launcher has reported. One that is still alive must not run next to its successor.
        self._presumed_dead: set[str] = set()

    # Events.

    def admit(self, description: TaskDescription, now: float) -> messages.JoinResponse:
        """Add a process that has arrived."""
        for incarnation in self.table.of_task(description.task):
            self.lose(incarnation, LossCause.REPLACED, now)
        self.table.add(description, now)
        self.early_exits.arrived(description.task)
        return messages.JoinResponse(self.generation > 0, self.table.limits.expected)

    def receive(self, incarnation: str, message: messages.ToCoordinator, now: float) -> None:
        """Handle a message from a process."""
        process = self.table.processes.get(incarnation)
        if process is None:  # already dismissed
            if incarnation in self._presumed_dead:
                self._send(incarnation, messages.Dismissed("the launcher considered it lost", "evicted"))
            elif self.failure:  # dismissed before its link was adopted, it may still wait for an answer
                self._send(incarnation, messages.Dismissed(self.failure, "failed"))
            elif self.state is CoordinatorState.FINISHED:
                self._send(incarnation, messages.Dismissed(FINISHED, "over"))
            return
        process.last_message_at = now
        match message:
            case messages.EntryQuery(entry):
                process.queried_entry = entry
            case messages.ReadyToJoin(entry):
                process.ready_entry = entry
            case messages.LossReport(generation):
                if generation == self.generation and incarnation in self.table.members:
                    process.report = message  # first, so that its sender is not notified of it
                    self._end_generation(now)
                    self._evictions.reported(message, now, is_first=len(self.table.reports) == 1)
            case messages.EntryStarted() | messages.EntryFinished():
                self.entries.record(message)
            case messages.EntryLeft():
                self.early_exits.entry_left(process, message)
            case messages.LeaveNotice() if self.early_exits.is_early(incarnation):
                self.lose(incarnation, LossCause.LEFT_EARLY, now)
            case messages.LeaveNotice():
                self.early_exits.left(incarnation)
                if incarnation in self.table.members:
                    self.table.finished_tasks.append(process.task)
                self.table.remove(incarnation)
        self._decide(now)

    def lose(self, incarnation: str, cause: LossCause, now: float, reason: str = "") -> None:
        """Handle the loss of a process, whatever its cause. `reason` explains an eviction."""
        process = self.table.processes.get(incarnation)
        if process is None:  # already dismissed; now it is really gone
            self._presumed_dead.discard(incarnation)
            return
        if cause is LossCause.PROCESS_ENDED:
            self._presumed_dead.add(incarnation)
        was_member = incarnation in self.table.members
        self.early_exits.left(incarnation)
        if cause is LossCause.EVICTED:
            self._dismiss(incarnation, "evicted", reason)
            self._job.evict(process.task)
        else:
            self.table.remove(incarnation)
            if was_member:
                remaining, maximum = len(self.table.members), self.table.limits.maximum
                what = "left before the end" if cause is LossCause.LEFT_EARLY else "is lost"
                self._job.log(f"{process.task} {what}; {remaining} of {maximum} workers remain")
        if was_member:
            self._is_chief_lost |= incarnation == self._chief
            # If it was the last member, the job is over if others have finished; otherwise the job's state is lost.
            if self.table.members:
                self._end_generation(now)
            elif not self.table.finished_tasks:
                self._fail("all members of the job were lost at once, so its state is lost", now, PeerLostError)
        self._decide(now)

    def resize(self, workers: int, now: float) -> None:
        """Set a new maximum number of members."""
        self.table.limits = replace(self.table.limits, maximum=workers)
        if self.state is CoordinatorState.REGROUP_REQUESTED:
            self._enter(CoordinatorState.RUNNING, now)
        self._decide(now)

    def limit_processes(self, workers: int, now: float) -> None:
        """Set the number of processes that will ever be started, so that the job does not wait for more."""
        self.table.process_limit = workers
        self._decide(now)

    def withdraw(self, task: str, now: float) -> None:
        """Withdraw a task whose host is withdrawn: it leaves before the next step."""
        self.table.withdrawn.add(task)
        self._decide(now)

    def tick(self, now: float) -> None:
        """Check for what is due by now. Call this several times per second."""
        self._evictions.tick(now)
        for incarnation, process in list(self.table.processes.items()):
            if incarnation in self.table.processes and self._evictions.is_silent(process, now):
                reason = f"it has been silent for {now - process.last_message_at:.1f} s"
                self.lose(incarnation, LossCause.EVICTED, now, reason)
        self._decide(now)

    # Decisions.

    def _enter(self, state: CoordinatorState, now: float) -> None:
        assert state in TRANSITIONS[self.state], f"no transition from {self.state} to {state}"
        self.state, self._state_since = state, now

    def _decide(self, now: float) -> None:
        """Do what the current state requires, if anything. Called after every change and by each tick."""
        if self.early_exits.is_training != self._is_training:
            self._is_training = not self._is_training
            self._job.training_changed(is_training=self._is_training)
        for incarnation, process in list(self.table.processes.items()):
            if incarnation in self.table.members:
                continue
            if answer := self.entries.answer(process, len(self.table.members)):
                self._send(incarnation, answer)
            if self.generation and process.is_waiting and self.table.is_withdrawn(incarnation):
                self._dismiss(incarnation, "surplus", WITHDRAWN)
        match self.state:
            case CoordinatorState.GATHERING:
                self._gather(now)
            case CoordinatorState.RUNNING | CoordinatorState.REGROUP_REQUESTED:
                # Surplus candidates leave immediately; surplus members only when all are before the same step.
                if self.table.members:
                    for incarnation in self.table.candidates(self.entries.joinable)[self.table.vacancies :]:
                        self._dismiss(incarnation, "surplus", SURPLUS)
                    self._request_regroup(now)
                else:
                    self._finish(now)
            case CoordinatorState.REGROUPING | CoordinatorState.SHORT_OF_MEMBERS:
                if self.table.members:
                    self._regroup(now)
                else:
                    self._finish(now)
            case CoordinatorState.FINISHED if self.table.processes:  # a process that arrived late
                self._finish(now)

    def _gather(self, now: float) -> None:
        table, limits = self.table, self.table.limits
        candidates = sorted(table.candidates(self.entries.joinable), key=lambda i: _rank_order(table.processes[i].task))
        is_due = now >= self._state_since + limits.start_s
        if len(candidates) >= table.initial_members or (is_due and len(candidates) >= limits.minimum):
            self._form(candidates[: limits.maximum], now)
        elif is_due:
            count, needed = len(candidates), limits.minimum
            self._fail(f"{count} of the {needed} workers that are needed arrived within {limits.start_s:g} s", now)

    def _regroup(self, now: float) -> None:
        """Form the next generation once all members have reported."""
        table = self.table
        if stuck := table.unreported:
            if table.reports and self._evictions.is_overdue(now):
                self._evict(stuck, STUCK, now)
            return
        if unreachable := self._connections.evictions(self.generation, table.members, table.reports):
            self._evict(unreachable, PARTITIONED, now)
            return
        reports = table.reports.values()
        if all(report.needs_state for report in reports):
            self._fail("all members that had the state of the job were lost, so its state is lost", now, PeerLostError)
            return
        members = table.members
        # Processes may join or leave only when all members are before the merge of the same step.
        if len({report.completed for report in reports}) == 1 and all(report.at_step_boundary for report in reports):
            for incarnation in table.surplus:
                self._dismiss(incarnation, "surplus", WITHDRAWN if table.is_withdrawn(incarnation) else SURPLUS)
            members = table.members + table.candidates(self.entries.joinable)[: table.vacancies]
            if len(members) < table.min_members:
                self._wait_for_members(len(members), now)
                return
        self._form(members, now)

    def _wait_for_members(self, count: int, now: float) -> None:
        limits = self.table.limits
        remain = f"{count_workers(count)} remain{'s' * (count == 1)}, and {limits.minimum} are needed"
        if self.table.process_limit is not None and self.table.process_limit < self.table.min_members:
            self._fail(f"{remain}, but no other will be started", now)
        elif self.state is not CoordinatorState.SHORT_OF_MEMBERS:
            self._enter(CoordinatorState.SHORT_OF_MEMBERS, now)
            self._job.log(f"{remain}: waiting for others")
        elif now >= self._state_since + limits.start_s:
            self._fail(f"{remain}, but no other arrived in time", now)

    def _request_regroup(self, now: float) -> None:
        """Ask the chief, at most once per generation, to regroup before the next step if a process is to join or leave,
        or if members are missing."""
        table = self.table
        joining = table.candidates(self.entries.joinable)[: table.vacancies]
        is_useful = joining or table.surplus or len(table.members) < table.min_members
        if is_useful and self.state is CoordinatorState.RUNNING:  # otherwise the request is pending
            self._enter(CoordinatorState.REGROUP_REQUESTED, now)
            self._send(table.members[0], messages.RegroupRequest(self.generation))

    def _form(self, incarnations: list[str], now: float) -> None:
        processes = self.table.processes
        # The chief must be a member that has the job's state. Candidates have no report and count as having it, but the
        # sort is stable, and they follow the members, one of which has it.
        incarnations = sorted(incarnations, key=lambda i: processes[i].needs_state)
        self.generation += 1
        is_first = self.generation == 1
        if is_first:
            self.table.limits = replace(self.table.limits, expected=len(incarnations))  # for later candidates
        addresses = self.table.set_members(incarnations, is_first=is_first)
        self._job.generation_formed(self.generation, [processes[i].task for i in incarnations])
        self._chief, self._is_chief_lost = incarnations[0], False
        self._evictions.generation_formed(now)
        self._enter(CoordinatorState.RUNNING, now)
        # Before the chief receives the generation: it could complete many steps before it reads the next message.
        self._request_regroup(now)
        broken = self._connections.broken_links(incarnations)
        for incarnation in incarnations:
            self._send(incarnation, messages.FormGeneration(self.generation, addresses, broken))

    def _end_generation(self, now: float) -> None:
        if self.state in (CoordinatorState.RUNNING, CoordinatorState.REGROUP_REQUESTED):
            self._enter(CoordinatorState.REGROUPING, now)
            for incarnation in self.table.unreported:
                self._send(incarnation, messages.GenerationEnded(self.generation))

    def _finish(self, now: float) -> None:
        """Finish the job: the last member has left."""
        if self._is_chief_lost:  # it may have had work left after the last step, such as saving the model
            self._fail("the chief was lost after the last step, before its program had ended", now, PeerLostError)
            return
        if self.state is not CoordinatorState.FINISHED:
            self._enter(CoordinatorState.FINISHED, now)
        for incarnation in list(self.table.processes):
            self._dismiss(incarnation, "over", FINISHED)
        self._job.finish(self.table.finished_tasks)

    def _fail(self, reason: str, now: float, error: type[PhalanxError] = RendezvousError) -> None:
        self.failure = reason
        self._enter(CoordinatorState.FAILED, now)
        self._job.log(f"the job has failed: {reason}")
        for incarnation in list(self.table.processes):
            self._dismiss(incarnation, "failed", reason)
        self._job.fail(reason, error.exit_code)

    def _evict(self, incarnations: Sequence[str], reason: str, now: float) -> None:
        # `lose` calls `_decide` for each: it evicts the rest of the list and may even form the next generation. `lose`
        # ignores those that are already gone when this loop reaches them.
        for incarnation in list(incarnations):
            self.lose(incarnation, LossCause.EVICTED, now, reason)

    def _dismiss(self, incarnation: str, cause: str, reason: str) -> None:
        self._send(incarnation, messages.Dismissed(reason, cause))
        task = self.table.remove(incarnation).task
        self.early_exits.dismissed(task)
        if cause in _LEAVES:
            self._job.log(f"{task} {_LEAVES[cause]}: {reason}")
        if cause == "surplus":
            self._job.release(task)


def _rank_order(task: str) -> tuple[bool, int]:
    """Sort key of the initial ranks: the order of the tasks, the chief first."""
    kind, _, index = task.partition("/")
    return kind != CHIEF, int(index)
