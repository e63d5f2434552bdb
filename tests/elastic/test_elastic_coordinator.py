"""The coordinator decides who takes part in an elastic job: pure decisions, without any process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from phalanx.cluster.membership_messages import (
    NOT_KEPT,
    Dismissed,
    EntryAlreadyFinished,
    EntryFinished,
    EntryLeft,
    EntryQuery,
    EntryStarted,
    FormGeneration,
    GenerationEnded,
    Heartbeat,
    LeaveNotice,
    LossReport,
    ReadyToJoin,
    RegroupRequest,
    pack,
    unpack,
)
from phalanx.cluster.task_comparison import JobFacts, TaskDescription
from phalanx.elastic import entry_log
from phalanx.elastic.elastic_coordinator import CoordinatorState, ElasticCoordinator, LossCause
from phalanx.elastic.eviction_policy import STUCK_GRACE_S
from phalanx.elastic.member_table import MembershipLimits
from phalanx.transport.decoding import Decoder


def description(name: str, *, backend: str = "jax") -> TaskDescription:
    """`a1` is the first life of worker 0, `a2` its second, `b1` the first of worker 1."""
    index = ord(name[0]) - ord("a")
    return TaskDescription(
        task=f"worker/{index}",
        incarnation=name,
        host="host",
        address=f"127.0.0.1:{4000 + index}",
        pid=100 + index,
        cluster={},
        phalanx="1",
        facts=JobFacts(backend=backend),
    )


class Job:
    """A coordinator, the messages that it has sent, and what it has requested of the launcher."""

    def __init__(self, minimum: int = 1, maximum: int = 3, expected: int = 3):
        self.sent: list[tuple[str, object]] = []
        self.evicted: list[str] = []
        self.over: list[list[str]] = []
        self.notes: list[str] = []
        self.training: list[bool] = []
        self.released: list[str] = []
        self.generations: list[list[str]] = []
        self.now = 0.0
        limits = MembershipLimits(minimum, maximum, expected, start_s=60.0, timeout_s=30.0)
        self.coordinator = ElasticCoordinator(
            limits, 0.0, job=self, send=lambda who, what: self.sent.append((who, what))
        )

    # See `LauncherActions`.

    def evict(self, task: str) -> None:
        self.evicted.append(task)

    def release(self, task: str) -> None:
        self.released.append(task)

    def finish(self, tasks: Sequence[str]) -> None:
        self.over.append(list(tasks))

    def fail(self, reason: str, code: int) -> None:
        self.over.append(["failed", str(code)])

    def resize(self, workers: int) -> None:
        raise NotImplementedError

    def generation_formed(self, generation: int, tasks: Sequence[str]) -> None:
        self.generations.append(list(tasks))

    def training_changed(self, *, is_training: bool) -> None:
        self.training.append(is_training)

    def log(self, text: str) -> None:
        self.notes.append(text)

    def arrive(self, *names: str, ready: int | None = 0) -> None:
        for name in names:
            self.coordinator.admit(description(name), self.now)
            if ready is not None:
                self.coordinator.receive(name, ReadyToJoin(ready), self.now)

    def send(self, name: str, message: object) -> None:
        self.coordinator.receive(name, message, self.now)  # type: ignore[arg-type]

    def report(self, *names: str, completed: int = 5, at_step_boundary: bool = True, **more: object) -> None:
        for name in names:
            self.send(name, LossReport(self.coordinator.generation, completed, at_step_boundary, **more))  # type: ignore[arg-type]

    def finish_program(self, *names: str) -> None:
        """These have done their part of the running entry, and end."""
        for name in names:
            self.send(name, EntryLeft(0, True))
            self.send(name, LeaveNotice())

    def lose(self, name: str) -> None:
        self.coordinator.lose(name, LossCause.LINK_CLOSED, self.now)

    def exit(self, name: str) -> None:
        self.coordinator.lose(name, LossCause.PROCESS_ENDED, self.now)

    def sent_to(self, name: str, kind: type) -> list[object]:
        return [what for who, what in self.sent if who == name and isinstance(what, kind)]

    def running(self) -> Job:
        self.arrive("a1", "b1", "c1")
        self.send("a1", EntryStarted(0))
        self.sent.clear()
        return self


def test_begins_when_all_have_come_in_the_order_of_tasks():
    job = Job()
    job.arrive("c1", "a1")
    assert job.coordinator.generation == 0
    job.arrive("b1")
    assert job.coordinator.table.members == ["a1", "b1", "c1"]
    (form,) = job.sent_to("c1", FormGeneration)
    assert form.generation == 1
    assert [address.needs_state for address in form.members] == [False] * 3


def test_begins_with_the_minimum_when_the_time_is_up():
    job = Job(minimum=2)
    job.arrive("a1", "b1")
    job.coordinator.tick(59.0)
    assert job.coordinator.generation == 0
    job.coordinator.tick(61.0)
    assert job.coordinator.table.members == ["a1", "b1"]


def test_too_few_at_the_start_are_sent_home():
    job = Job(minimum=2)
    job.arrive("a1")
    job.coordinator.tick(61.0)
    (dismissed,) = job.sent_to("a1", Dismissed)
    assert dismissed.cause == "failed"
    assert "1 of the 2 workers that are needed" in dismissed.reason


def test_the_survivors_of_a_loss_form_the_next_generation_when_all_have_reported():
    job = Job().running()
    job.lose("b1")
    job.report("a1")
    assert job.coordinator.generation == 1
    job.report("c1")
    assert job.coordinator.table.members == ["a1", "c1"]
    (form,) = job.sent_to("c1", FormGeneration)
    assert form.generation == 2
    assert [address.task for address in form.members] == ["worker/0", "worker/2"]


def test_when_the_chief_is_lost_the_next_rank_becomes_chief():
    job = Job().running()
    job.lose("a1")
    job.report("b1", "c1")
    assert job.coordinator.table.members == ["b1", "c1"]


def test_another_loss_while_regrouping():
    job = Job().running()
    job.lose("b1")
    job.report("a1")
    job.lose("c1")
    assert job.coordinator.table.members == ["a1"]
    assert job.coordinator.generation == 2


def test_a_candidate_comes_in_where_all_stand_before_the_same_step():
    job = Job().running()
    job.lose("b1")
    job.arrive("b2")
    job.report("a1", "c1")
    assert job.coordinator.table.members == ["a1", "c1", "b2"]
    (form,) = job.sent_to("b2", FormGeneration)
    assert [address.needs_state for address in form.members] == [False, False, True]


@pytest.mark.parametrize(
    "second", [{"completed": 6}, {"at_step_boundary": False}], ids=["one is ahead", "not before a step"]
)
def test_a_candidate_waits_where_they_do_not(second):
    job = Job().running()
    job.lose("b1")
    job.arrive("b2")
    job.report("a1")
    job.report("c1", **second)
    assert job.coordinator.table.members == ["a1", "c1"]
    assert job.sent_to("a1", RegroupRequest) == [RegroupRequest(2)]  # at once the chief is asked for another regrouping
    job.report("a1", "c1", completed=7)
    assert job.coordinator.table.members == ["a1", "c1", "b2"]


def test_too_few_that_have_to_finish_something_take_no_step_more():
    """The chief hears that it has to wait before it hears of the generation in which it finishes it."""
    job = Job(minimum=3).running()
    job.lose("b1")
    job.report("a1", "c1", at_step_boundary=False)
    assert [type(what) for who, what in job.sent if who == "a1"][-2:] == [RegroupRequest, FormGeneration]
    job.report("a1", "c1", completed=7)
    assert "2 workers remain, and 3 are needed: waiting for others" in job.notes
    job.arrive("b2")
    assert job.coordinator.table.members == ["a1", "c1", "b2"]


def test_a_candidate_at_another_entry_waits():
    job = Job().running()
    job.lose("b1")
    job.arrive("b2", ready=1)
    job.report("a1", "c1")
    assert job.coordinator.table.members == ["a1", "c1"]
    job.send("a1", EntryFinished(0, b"result"))
    assert job.sent_to("a1", RegroupRequest) == [RegroupRequest(2)]


def test_a_candidate_is_told_what_is_over_and_what_has_begun():
    job = Job().running()
    job.lose("b1")
    job.report("a1", "c1")
    job.arrive("b2", ready=None)
    job.send("b2", EntryQuery(0))
    assert job.sent_to("b2", EntryStarted) == [EntryStarted(0, b"", 2)]
    job.send("b2", ReadyToJoin(0))
    job.send("a1", EntryFinished(0, b"result"))
    assert job.sent_to("b2", EntryAlreadyFinished) == [EntryAlreadyFinished(0, b"result")]
    job.send("b2", EntryQuery(1))
    assert len(job.sent_to("b2", EntryStarted)) == 1
    job.send("a1", EntryStarted(1, b"note"))
    assert job.sent_to("b2", EntryStarted)[1] == EntryStarted(1, b"note", 2)


def test_below_the_minimum_they_wait_for_others_before_the_next_step():
    job = Job(minimum=2, maximum=2, expected=2)
    job.arrive("a1", "b1")
    job.send("a1", EntryStarted(0))
    job.lose("b1")
    job.report("a1")
    assert job.coordinator.generation == 1
    assert "1 worker remains, and 2 are needed" in job.notes[-1]
    job.arrive("b2")
    assert job.coordinator.table.members == ["a1", "b2"]


def test_below_the_minimum_for_too_long_the_job_fails():
    job = Job(minimum=2, maximum=2, expected=2)
    job.arrive("a1", "b1")
    job.lose("b1")
    job.report("a1")
    job.coordinator.tick(59.0)
    assert not job.coordinator.failure
    job.coordinator.tick(61.0)
    (dismissed,) = job.sent_to("a1", Dismissed)
    assert "no other arrived in time" in dismissed.reason


def test_when_some_have_finished_the_minimum_is_nobodys_concern():
    job = Job(minimum=3).running()
    job.finish_program("a1")
    job.lose("b1")
    job.report("c1")
    assert job.coordinator.table.members == ["c1"]


def test_one_that_leaves_in_the_middle_of_an_entry_is_lost():
    job = Job(minimum=3).running()
    job.send("b1", LeaveNotice())
    assert "worker/1 left before the end; 2 of 3 workers remain" in job.notes
    assert job.coordinator.early_exits.has_left_early("worker/1")
    job.report("a1", "c1")
    assert "2 workers remain, and 3 are needed: waiting for others" in job.notes
    job.arrive("b2")
    assert job.coordinator.table.members == ["a1", "c1", "b2"]


def test_a_chief_that_leaves_in_the_middle_of_an_entry_is_lost():
    job = Job().running()
    job.send("a1", LeaveNotice())
    job.report("b1", "c1")
    assert job.coordinator.table.members == ["b1", "c1"]
    assert job.coordinator.early_exits.has_left_early("worker/0")


@pytest.mark.parametrize("leave", ["notice", "closed link"])
def test_one_that_has_done_its_part_first_has_finished(leave):
    """The chief is a moment behind, or writes what it alone writes."""
    job = Job().running()
    job.send("b1", EntryLeft(0, True))
    if leave == "notice":
        job.send("b1", LeaveNotice())
    else:
        job.lose("b1")
    assert not job.coordinator.early_exits.has_left_early("worker/1")
    assert (job.coordinator.table.finished_tasks == ["worker/1"]) == (leave == "notice")


def test_when_the_chief_has_finished_an_entry_nobody_leaves_it_early():
    job = Job().running()
    assert job.training == [True]
    job.send("a1", EntryFinished(0, b"result"))
    assert job.training == [True, False]
    job.send("c1", LeaveNotice())
    job.lose("b1")
    assert not any(job.coordinator.early_exits.has_left_early(f"worker/{index}") for index in range(3))


def test_all_may_leave_after_an_error_that_they_caught():
    """The error ended the entry on all of them, so that none has finished it."""
    job = Job().running()
    for name in ("b1", "a1", "c1"):
        job.send(name, EntryLeft(0, False))
    for name in ("b1", "a1", "c1"):
        job.send(name, LeaveNotice())
    assert job.over == [["worker/1", "worker/0", "worker/2"]]


def test_one_that_alone_met_an_error_and_caught_it_is_lost():
    job = Job().running()
    job.send("b1", EntryLeft(0, False))
    job.send("b1", LeaveNotice())
    assert job.coordinator.table.finished_tasks == []
    assert job.coordinator.early_exits.has_left_early("worker/1")


def test_one_that_leaves_between_two_entries_has_finished():
    job = Job(minimum=2).running()
    job.send("a1", EntryFinished(0, b"result"))
    for name in ("a1", "b1", "c1"):
        job.send(name, EntryLeft(0, True))
    job.send("b1", LeaveNotice())
    job.send("a1", EntryStarted(1))
    assert not job.coordinator.early_exits.has_left_early("worker/1")
    assert job.training == [True, False, True]


def test_one_that_ends_before_it_arrives_leaves_early_if_others_train():
    job = Job(expected=2)
    assert not job.coordinator.early_exits.has_left_early("worker/2")  # a program without a strategy
    job.arrive("a1", "b1")
    job.send("a1", EntryStarted(0))
    assert job.coordinator.early_exits.has_left_early("worker/2")
    job.arrive("c1", ready=None)
    assert job.coordinator.early_exits.has_left_early("worker/2")  # its link is still open
    job.send("c1", LeaveNotice())
    assert job.coordinator.early_exits.has_left_early("worker/2")
    job.send("a1", EntryFinished(0, b"result"))
    job.arrive("c2", ready=None)
    assert not job.coordinator.early_exits.has_left_early("worker/2")


def test_a_task_that_returns_has_not_finished():
    job = Job(minimum=3).running()
    job.send("a1", EntryFinished(0, b"result"))
    job.send("b1", LeaveNotice())
    assert job.coordinator.table.min_members == 1
    job.arrive("b2")
    assert job.coordinator.table.min_members == 3


@pytest.mark.parametrize("known_before", [False, True])
def test_nobody_waits_for_those_who_will_never_come(known_before):
    job = Job(minimum=3).running()
    if known_before:
        job.coordinator.limit_processes(2, 0.0)
    job.lose("b1")
    job.report("a1", "c1")
    if not known_before:
        assert job.coordinator.failure == ""
        job.coordinator.limit_processes(2, 0.0)
    assert "no other will be started" in job.coordinator.failure
    assert job.over == [["failed", "66"]]


@pytest.mark.parametrize("known_before", [False, True])
def test_a_job_begins_without_those_who_will_never_come(known_before):
    job = Job(minimum=2)
    if known_before:
        job.coordinator.limit_processes(2, 0.0)
    job.arrive("a1", "c1")
    if not known_before:
        assert job.generations == []
        job.coordinator.limit_processes(2, 0.0)
    assert job.generations == [["worker/0", "worker/2"]]


def test_a_job_does_not_begin_with_fewer_than_its_minimum_whoever_will_never_come():
    job = Job(minimum=2)
    job.arrive("a1")
    job.coordinator.limit_processes(1, 0.0)
    assert job.generations == []


def test_a_member_that_does_not_report_is_evicted_after_the_timeout():
    job = Job().running()
    job.lose("b1")
    job.report("a1")
    job.coordinator.tick(29.0)
    assert job.evicted == []
    job.coordinator.tick(31.0)
    assert job.evicted == ["worker/2"]
    assert job.coordinator.table.members == ["a1"]
    (dismissed,) = job.sent_to("c1", Dismissed)
    assert dismissed.cause == "evicted"


def test_one_for_which_the_others_have_waited_already_is_evicted_soon():
    job = Job().running()
    job.report("a1", timeout_text="worker/2 did not come")
    job.report("b1", timeout_text="worker/2 did not come")
    job.coordinator.tick(STUCK_GRACE_S / 2)
    assert job.evicted == []
    job.coordinator.tick(STUCK_GRACE_S * 1.1)
    assert job.evicted == ["worker/2"]
    assert job.coordinator.table.members == ["a1", "b1"]


def test_the_words_of_one_that_was_evicted_count_for_nothing():
    job = Job().running()
    job.lose("b1")
    job.report("a1")
    job.coordinator.tick(31.0)
    job.send("c1", LossReport(2, 9, True))
    job.send("c1", EntryFinished(0, b"lie"))
    assert job.coordinator.table.members == ["a1"]
    assert job.coordinator.entries.current == 0


def test_all_lost_at_once():
    job = Job(maximum=4).running()
    job.arrive("d1")
    for name in ("a1", "b1", "c1"):
        job.lose(name)
    assert "all members of the job were lost" in job.coordinator.failure
    (dismissed,) = job.sent_to("d1", Dismissed)
    assert dismissed.cause == "failed"


def test_only_members_that_know_nothing_are_left():
    job = Job().running()
    job.lose("b1")
    job.arrive("b2")
    job.report("a1", "c1")
    job.lose("a1")
    job.lose("c1")
    job.report("b2", needs_state=True)
    assert "its state is lost" in job.coordinator.failure


def test_a_task_that_returns_before_its_end_was_noticed():
    job = Job().running()
    job.arrive("b2")
    assert job.coordinator.table.members == ["a1", "c1"]


def test_who_disagrees_is_refused():
    job = Job().running()
    text = job.coordinator.table.disagreement(description("d1", backend="torch"))
    assert text is not None
    assert "KERAS_BACKEND" in text


def test_fewer_are_wanted():
    job = Job().running()
    job.coordinator.resize(2, 1.0)
    assert job.sent_to("a1", RegroupRequest) == [RegroupRequest(1)]
    job.report("a1", "b1", "c1")
    assert job.coordinator.table.members == ["a1", "b1"]
    (dismissed,) = job.sent_to("c1", Dismissed)
    assert dismissed.cause == "surplus"


def test_a_member_whose_host_is_taken_back_leaves_before_a_next_step():
    job = Job().running()
    job.coordinator.withdraw("worker/0", 1.0)
    assert job.coordinator.table.members == ["a1", "b1", "c1"]
    assert job.sent_to("a1", RegroupRequest) == [RegroupRequest(1)]
    job.report("a1", "b1", "c1")
    assert job.coordinator.table.members == ["b1", "c1"]
    (dismissed,) = job.sent_to("a1", Dismissed)
    assert dismissed.cause == "surplus"
    assert job.released == ["worker/0"]
    job.arrive("a2")  # it was not readmitted
    assert job.sent_to("a2", Dismissed)
    job.coordinator.table.withdrawn.discard("worker/0")
    job.arrive("a3")
    job.coordinator.tick(2.0)
    job.report("b1", "c1")
    assert job.coordinator.table.members == ["b1", "c1", "a3"]


def test_one_that_has_the_state_stays_until_another_one_has_it():
    job = Job(maximum=2, expected=2)
    job.arrive("a1", "b1")
    job.send("a1", EntryStarted(0))
    job.coordinator.withdraw("worker/0", 1.0)
    job.coordinator.withdraw("worker/1", 1.0)
    job.report("a1", "b1")
    assert job.coordinator.table.members == ["a1"]
    job.coordinator.tick(2.0)
    assert len(job.sent_to("a1", RegroupRequest)) == 1  # it is not asked again for nothing
    job.coordinator.table.withdrawn.discard("worker/1")
    job.arrive("b2")
    job.report("a1")
    assert job.coordinator.table.members == ["a1", "b2"]
    job.coordinator.tick(3.0)
    job.report("a1")
    job.report("b2", needs_state=True)  # it has not been given the state yet
    assert job.coordinator.table.members == ["a1", "b2"]
    job.coordinator.tick(4.0)
    job.report("a1", "b2")
    assert job.coordinator.table.members == ["b2"]


def test_a_candidate_whose_host_is_taken_back_is_sent_away():
    job = Job().running()
    job.lose("b1")
    job.arrive("b2")
    job.coordinator.withdraw("worker/1", 1.0)
    (dismissed,) = job.sent_to("b2", Dismissed)
    assert dismissed.cause == "surplus"


def test_the_job_is_over_when_all_have_left():
    job = Job(maximum=4).running()
    job.arrive("d1")
    job.finish_program("a1", "b1", "c1")
    assert job.over == [["worker/0", "worker/1", "worker/2"]]
    (dismissed,) = job.sent_to("d1", Dismissed)
    assert dismissed.cause == "over"


def test_one_that_arrives_as_the_job_finishes_is_answered():
    """Nothing can be sent to it before its link is adopted."""
    job = Job().running()
    job.finish_program("a1", "b1", "c1")
    job.arrive("d1", ready=None)
    job.coordinator.tick(job.now)
    job.sent.clear()  # not adopted yet
    job.send("d1", EntryQuery(0))
    assert [dismissed.cause for dismissed in job.sent_to("d1", Dismissed)] == ["over"]


def test_one_that_arrives_as_the_job_fails_is_answered():
    job = Job().running()
    job.arrive("d1", ready=None)
    for name in ("a1", "b1", "c1"):
        job.lose(name)
    job.sent.clear()  # not adopted yet
    job.send("d1", EntryQuery(0))
    assert [dismissed.cause for dismissed in job.sent_to("d1", Dismissed)] == ["failed"]


def test_members_that_may_not_hear_of_a_loss_are_told_that_the_generation_is_over():
    job = Job().running()
    job.report("a1")
    assert job.sent_to("a1", GenerationEnded) == []
    assert job.sent_to("b1", GenerationEnded) == job.sent_to("c1", GenerationEnded) == [GenerationEnded(1)]
    job.report("b1", "c1")
    assert len(job.sent_to("c1", GenerationEnded)) == 1


def test_two_that_have_waited_for_each_other_part_at_once():
    job = Job().running()
    job.report("a1", timeout_text="b1 did not come", unreachable=["b1"])
    job.report("b1", timeout_text="a1 did not come", unreachable=["a1"])
    job.report("c1", timeout_text="a1 gave up")
    assert job.evicted == ["worker/1"]
    assert job.coordinator.table.members == ["a1", "c1"]


def test_a_pair_of_which_one_complains_gets_a_new_link_and_parts_if_that_is_in_vain():
    job = Job().running()
    job.report("a1", unreachable=["c1"])
    job.report("b1", "c1")
    assert job.evicted == []
    assert job.sent_to("b1", FormGeneration)[-1].broken == [("a1", "c1")]
    job.report("a1", "b1", links_formed=False)
    job.report("c1", unreachable=["a1"], links_formed=False)
    assert job.evicted == ["worker/2"]
    assert job.coordinator.table.members == ["a1", "b1"]


def test_a_complaint_is_forgotten_when_a_collective_has_succeeded():
    job = Job().running()
    for completed in range(5, 10):
        job.report("a1", unreachable=["c1"], completed=completed)
        job.report("b1", "c1", completed=completed)
    assert job.evicted == []
    assert job.coordinator.table.members == ["a1", "b1", "c1"]


def test_one_that_has_no_state_goes_before_one_that_has():
    job = Job(maximum=3).running()
    job.lose("a1")
    job.lose("b1")
    job.arrive("a2", "b2")
    job.report("c1")
    assert job.coordinator.table.members == ["c1", "a2", "b2"]
    job.report("c1", timeout_text="they did not come", unreachable=["a2", "b2"])
    job.report("a2", "b2", timeout_text="c1 did not come", unreachable=["c1"], needs_state=True)
    assert job.coordinator.table.members == ["c1"]


def test_when_the_links_never_stood_the_others_have_waited_since_it_was_formed():
    job = Job().running()
    job.now = 5.0
    job.report("a1", links_formed=False)
    job.coordinator.tick(29.0)
    assert job.evicted == []
    job.report("b1", links_formed=False)
    job.coordinator.tick(30.5)
    assert job.evicted == ["worker/2"]


@pytest.mark.parametrize("ever_heard", [False, True])
@pytest.mark.parametrize("candidate", [False, True])
def test_one_that_is_silent_is_evicted_though_nobody_waits_for_it(candidate, ever_heard):
    job = Job().running()
    if candidate:
        job.lose("b1")
        job.arrive("b2", ready=None)
        job.report("a1", "c1")
    silent = "b2" if candidate else "b1"
    if ever_heard:
        job.send(silent, Heartbeat())
    for now in range(1, 40):
        job.now = float(now)
        for name in list(job.coordinator.table.processes):
            if name != silent:
                job.send(name, Heartbeat())
        job.coordinator.tick(job.now)
        assert bool(job.evicted) == (now > 30.0 + STUCK_GRACE_S)


def test_the_last_one_that_is_silent_ends_the_job():
    job = Job().running()
    job.lose("b1")
    job.lose("c1")
    job.report("a1")
    job.now = 1.0
    job.send("a1", Heartbeat())
    for now in range(1, 34):
        job.coordinator.tick(float(now))
    assert "all members of the job were lost" in job.coordinator.failure


def test_while_the_launcher_was_stopped_nobody_was_silent():
    job = Job().running()
    job.now = 1.0
    for name in ("a1", "b1", "c1"):
        job.send(name, Heartbeat())
    job.coordinator.tick(1.0)
    job.coordinator.tick(100.0)
    assert job.evicted == []


def test_the_launcher_knows_of_an_end_before_the_network_does():
    job = Job().running()
    job.exit("b1")
    job.report("a1", "c1")
    assert job.coordinator.table.members == ["a1", "c1"]


def test_results_are_kept_as_long_as_there_is_room(monkeypatch):
    monkeypatch.setattr(entry_log, "KEPT_BYTES", 10)
    job = Job().running()
    job.send("a1", EntryFinished(0, b"12345678"))
    job.send("a1", EntryFinished(1, b"12345678"))
    job.arrive("d1", ready=None)
    job.send("d1", EntryQuery(0))
    job.send("d1", EntryQuery(1))
    assert job.sent_to("d1", EntryAlreadyFinished) == [
        EntryAlreadyFinished(0, b"12345678"),
        EntryAlreadyFinished(1, NOT_KEPT),
    ]


def test_of_states_the_newest_are_kept(monkeypatch):
    monkeypatch.setattr(entry_log, "KEPT_STATE_BYTES", 10)
    job = Job().running()
    for entry in range(3):
        job.send("a1", EntryFinished(entry, b"result", b"1234"))
    job.arrive("d1", ready=None)
    for entry in range(3):
        job.send("d1", EntryQuery(entry))
    assert [past.state for past in job.sent_to("d1", EntryAlreadyFinished)] == [b"", b"1234", b"1234"]
    assert {past.result for past in job.sent_to("d1", EntryAlreadyFinished)} == {b"result"}


@pytest.mark.parametrize(
    "message",
    [
        EntryFinished(3, b"x" * 2**21, b"y" * 2**21),
        EntryAlreadyFinished(3, b""),
        EntryAlreadyFinished(3, b"x" * 2**21),
        EntryStarted(2, b"note"),
    ],
)
def test_a_result_travels_behind_the_header(message):
    header, buffers = pack(message)
    assert len(header) < 100
    decoder = Decoder(type(message))
    assert unpack(decoder, header, [memoryview(buffer) for buffer in buffers]) == message


def test_a_chief_that_is_lost_when_the_others_have_finished_had_work_to_do():
    """It writes what it alone writes, after the last step, while the others are ending."""
    job = Job().running()
    job.lose("a1")
    assert job.coordinator.state is CoordinatorState.REGROUPING
    job.finish_program("b1")
    job.finish_program("c1")
    assert job.over == [["failed", "71"]]
    assert "the chief was lost after the last step" in job.coordinator.failure


def test_another_that_is_lost_when_the_chief_has_finished_had_not():
    job = Job().running()
    job.finish_program("a1")
    job.lose("b1")
    job.finish_program("c1")
    assert job.over == [["worker/0", "worker/2"]]


def test_one_that_was_taken_for_lost_and_lives_is_told_to_end():
    job = Job().running()
    job.exit("b1")
    assert job.coordinator.state is CoordinatorState.REGROUPING
    job.send("b1", Heartbeat())
    (dismissed,) = job.sent_to("b1", Dismissed)
    assert dismissed.cause == "evicted"
    job.lose("b1")  # its connection ends
    job.send("b1", Heartbeat())
    assert len(job.sent_to("b1", Dismissed)) == 1


def test_hosts_that_are_taken_back_before_the_beginning_take_part_until_others_are_there():
    job = Job(maximum=2, expected=2)
    job.coordinator.withdraw("worker/0", 0.0)
    job.coordinator.withdraw("worker/1", 0.0)
    job.arrive("a1", "b1")
    assert job.coordinator.table.members == ["a1", "b1"]
    assert not job.released


def test_members_on_their_way_out_leave_room_for_others():
    """At the maximum of one, whose host is withdrawn: another one joins first, then it leaves."""
    job = Job(maximum=1, expected=1)
    job.arrive("a1")
    job.send("a1", EntryStarted(0))
    job.coordinator.withdraw("worker/0", 0.0)
    job.arrive("b1")
    assert job.sent_to("a1", RegroupRequest)
    job.report("a1")
    assert job.coordinator.table.members == ["a1", "b1"]
    job.coordinator.tick(job.now)
    assert len(job.sent_to("a1", RegroupRequest)) == 2
    job.report("a1", "b1", completed=6)
    assert job.coordinator.table.members == ["b1"]
    assert job.released == ["worker/0"]


def test_candidates_beyond_the_maximum_are_sent_away():
    job = Job().running()
    job.coordinator.resize(2, 0.0)
    job.report("a1", "b1", "c1")
    assert job.coordinator.table.members == ["a1", "b1"]
    job.arrive("c2")
    assert job.sent_to("c2", Dismissed)
    assert job.released == ["worker/2", "worker/2"]


def test_nobody_is_evicted_for_one_that_waited_and_is_gone_itself():
    job = Job().running()
    job.lose("a1")
    job.report("c1")
    job.lose("c1")
    job.coordinator.tick(100.0)
    assert job.evicted == []
    assert job.coordinator.table.members == ["b1"]
