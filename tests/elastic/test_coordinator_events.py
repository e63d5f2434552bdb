"""Whatever happens in whatever order, the coordinator keeps to its table of transitions and to its invariants."""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cluster.membership_messages import (
    EntryFinished,
    EntryLeft,
    EntryQuery,
    EntryStarted,
    FormGeneration,
    LeaveNotice,
    LossReport,
    ReadyToJoin,
)
from phalanx.cluster.task_comparison import JobFacts, TaskDescription
from phalanx.elastic.elastic_coordinator import (
    TRANSITIONS,
    CoordinatorState,
    ElasticCoordinator,
    LossCause,
)
from phalanx.elastic.member_table import MembershipLimits

TASKS = 4
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "arrive",
                "query",
                "ready",
                "report",
                "late",
                "begin",
                "finish",
                "left",
                "failed",
                "leave",
                "lose",
                "exit",
                "tick",
                "wait",
                "resize",
                "withdraw",
                "readmit",
                "limit",
            ]
        ),
        st.integers(0, TASKS - 1),
    ),
    max_size=60,
)


class Job:
    """A coordinator, the newest process of each task, and the members that it has ordered."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lives = [0] * TASKS
        self.entries = [0] * TASKS
        self.generations: list[int] = []
        limits = MembershipLimits(2, TASKS, 3, start_s=60.0, timeout_s=30.0)
        self.coordinator = ElasticCoordinator(limits, 0.0, job=mock.Mock(), send=self._sent)

    def _sent(self, incarnation: str, message: object) -> None:
        if isinstance(message, FormGeneration):
            assert incarnation in {address.incarnation for address in message.members}
            self.generations.append(message.generation)

    def happen(self, event: str, index: int) -> None:
        coordinator, name = self.coordinator, f"{index}.{self.lives[index]}"
        if event == "arrive":
            self.lives[index] += 1
            facts = {"host": "host", "address": "127.0.0.1:1", "pid": 1, "cluster": {}, "phalanx": "1"}
            description: Any = TaskDescription(
                task=f"worker/{index}", incarnation=f"{index}.{self.lives[index]}", facts=JobFacts(), **facts
            )
            coordinator.admit(description, self.now)
        elif event in ("query", "ready", "report", "late", "begin", "finish", "left", "failed", "leave"):
            generation, entry = coordinator.generation, max(0, coordinator.entries.current)
            message = {
                "query": EntryQuery(entry),
                "ready": ReadyToJoin(entry),
                "report": LossReport(generation, 5, True),
                "late": LossReport(generation, 5, False, timeout_text="late", unreachable=[f"0.{self.lives[0]}"]),
                "begin": EntryStarted(entry),
                "finish": EntryFinished(entry, b"result"),
                "left": EntryLeft(entry, is_finished=True),
                "failed": EntryLeft(entry, is_finished=False),
                "leave": LeaveNotice(),
            }[event]
            coordinator.receive(name, message, self.now)
        elif event in ("lose", "exit"):
            cause = LossCause.LINK_CLOSED if event == "lose" else LossCause.PROCESS_ENDED
            coordinator.lose(name, cause, self.now)
        elif event in ("tick", "wait"):
            for _ in range(1 if event == "tick" else 40):
                self.now += 1.0
                coordinator.tick(self.now)
        elif event == "resize":
            coordinator.resize(2 + index % 3, self.now)
        elif event == "withdraw":
            coordinator.withdraw(f"worker/{index}", self.now)
        elif event == "readmit":
            coordinator.table.withdrawn.discard(f"worker/{index}")
        else:
            coordinator.limit_processes(index, self.now)


@given(EVENTS)
@settings(max_examples=100, deadline=None)
def test_any_order_of_events(events: list[tuple[str, int]]) -> None:
    job = Job()
    for index in range(3):  # most orders of events never get a job to begin
        job.happen("arrive", index)
        job.happen("ready", index)
    assert job.coordinator.state is CoordinatorState.RUNNING
    for event, index in events:
        before = job.coordinator.state
        job.happen(event, index)
        state, table = job.coordinator.state, job.coordinator.table
        assert len(set(table.members)) == len(table.members)
        assert set(table.members) <= table.processes.keys()
        assert (state is CoordinatorState.FAILED) == bool(job.coordinator.failure)
        if not TRANSITIONS[before]:
            assert state is before
            assert not table.members
    assert job.generations == sorted(job.generations)
