"""What the events of a job mean: one state after another, without processes."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.launcher import start_phases
from phalanx.monitoring import job_events as events
from phalanx.monitoring import job_view, preparation
from phalanx.monitoring.job_endings import FAILED, RUNNING, STOPPED, SUCCEEDED, describe_ending
from phalanx.monitoring.job_events import HostStatus, JobEvent
from phalanx.monitoring.job_view import JobView, advance, replay, why_not
from phalanx.monitoring.job_wording import doing, position, progress
from phalanx.monitoring.worker_figures import ServerFigures, TaskReport, WorkerFigures
from phalanx.runtime import progress as worker_progress

TASKS = ["worker/0", "worker/1"]


def begin(kind: str = events.FIXED, tasks: list[str] = TASKS) -> list[JobEvent]:
    started = events.JobStarted(100.0, "job", "train.py", kind, tasks, 1, len(tasks), "host", 1, "0.1.0")
    return [started, *(events.TaskStarted(100.5, task, rank, "host", 10 + rank) for rank, task in enumerate(tasks))]


def measured(at: float, step: int, *, tasks: list[str] = TASKS, saves: bool = False, **logs: float) -> events.Measured:
    """Each task has taken so many steps of 10 samples, a quarter of the time waiting."""
    figures = WorkerFigures(
        computed_s=0.75 * (at - 101),
        waited_s=0.25 * (at - 101),
        steps=step,
        samples=10 * step,
        bytes_sent=100 * step,
        memory=5,
        logs=dict(logs),
    )
    return events.Measured(at, {task: TaskReport("gradients", 0, step, 0.0, saves, figures) for task in tasks})


def test_rates_and_sums_follow_from_what_the_members_report() -> None:
    state = replay([*begin(), *(measured(101.0 + second, 20 * second, loss=1.0 / (second + 1)) for second in range(5))])
    assert (state.steps, state.samples, state.bytes_sent) == (80, 1600, 16000)
    assert (state.steps_per_s, state.samples_per_s, state.bytes_per_s) == (20.0, 400.0, 4000.0)
    assert (state.epoch, state.step, state.logs) == (0, 80, {"loss": 0.2})
    member = state.members["worker/1"]
    assert (member.compute_s, member.wait_s) == (pytest.approx(0.0375), pytest.approx(0.0125))
    assert (member.wait_fraction, member.computed_s, member.memory) == (0.25, 3.0, 5)
    assert [point.step for point in state.history] == [20, 40, 60, 80]


def test_the_steps_of_a_process_that_was_replaced_count_once() -> None:
    state = replay([*begin(), measured(101.0, 0), measured(102.0, 20)])
    for event in (
        events.TaskExited(103.0, "worker/1", 137, "was killed by SIGKILL"),
        events.TaskStarted(104.0, "worker/1", 1, "host", 20),
        measured(105.0, 3, tasks=["worker/1"]),
        measured(106.0, 30, tasks=["worker/0"]),
    ):
        state = advance(state, event)
    assert state.steps == 30  # of worker/0, which was there all the time
    assert (state.members["worker/1"].starts, state.members["worker/1"].pid) == (2, 20)
    life, second_life = [span for span in state.spans if span.task == "worker/1"]
    assert (life.start, life.end, life.level) == (100.5, 103.0, job_view.BAD)
    assert second_life.end is None
    assert state.feed[-1].text == "worker/1 started on host, pid 20, for the 2nd time"


def test_steps_count_once_though_members_report_at_different_moments() -> None:
    state = replay([*begin(), measured(101.0, 0)])
    for second in range(10):
        state = advance(state, measured(101.5 + second, 10 * second + 5, tasks=["worker/0"]))
        state = advance(state, measured(102.0 + second, 10 * second + 10, tasks=["worker/1"]))
        assert (state.steps, state.samples) == (10 * second + 10, 10 * (20 * second + 15))


def test_the_steps_of_a_member_that_joined_continue_those_of_the_others() -> None:
    state = replay([*begin(events.ELASTIC), events.GenerationFormed(101.0, 1, ["worker/0"])])
    for event in (
        measured(102.0, 50, tasks=["worker/0"]),
        measured(103.0, 100, tasks=["worker/0"]),
        events.GenerationFormed(103.0, 2, TASKS),
        measured(104.0, 10, tasks=["worker/1"]),
        measured(104.5, 120, tasks=["worker/0"]),
    ):
        state = advance(state, event)
    assert state.steps == 120
    left = advance(advance(state, events.TaskExited(105.0, "worker/0", 137, "was killed")), measured(106.0, 40))
    assert left.steps == 140
    again = advance(left, begin(events.ELASTIC)[0])
    for event in (*begin(events.ELASTIC)[1:], measured(107.0, 3)):
        again = advance(again, event)
    assert again.steps == 143


def test_members_join_and_leave() -> None:
    state = replay([*begin(events.ELASTIC), events.GenerationFormed(101.0, 1, TASKS)])
    state = advance(state, events.GenerationFormed(102.0, 2, ["worker/0"]))
    assert (state.generation, state.members["worker/1"].is_member) == (2, False)
    assert state.feed[-1].text == "generation 2: 1 worker; worker/1 left"
    state = advance(state, events.TaskStarted(103.0, "worker/1", 1, "host", 30))
    state = advance(state, measured(103.5, 0))
    assert doing(state.members["worker/1"], 103.6) == "waits to join (gradients)"
    state = advance(state, events.GenerationFormed(104.0, 3, TASKS))
    assert state.feed[-1].text == "generation 3: 2 workers; worker/1 joined"
    assert [len(generation.tasks) for generation in state.generations] == [2, 1, 2]


def test_what_a_member_does_is_said_in_words() -> None:
    state = replay([*begin(), measured(101.0, 7), events.StragglersChanged(101.5, ["worker/1"])])
    assert doing(state.members["worker/0"], 101.6) == "gradients, epoch 1, step 8"
    assert doing(state.members["worker/1"], 101.6) == "gradients, epoch 1, step 8: slow, the others wait for it"
    assert doing(state.members["worker/0"], 110.0) == "silent for 9 s: stopped, or its host is overloaded"
    state = advance(state, events.StragglersChanged(102.0, []))
    assert (state.feed[-1].text, state.stragglers_seen) == ("worker/1 recovered", {"worker/1": 1})
    state = advance(state, events.TaskExited(103.0, "worker/0", 0, "ended with exit code 0"))
    assert doing(state.members["worker/0"], 104.0) == "ended with exit code 0"


def test_what_a_process_does_before_its_first_step_is_no_computing() -> None:
    state = replay(begin())

    def report(at: float, phase: str, steps: int, step: int | None = None) -> None:
        nonlocal state
        figures = WorkerFigures(computed_s=at - 101, steps=steps, samples=10 * steps)
        epoch = None if step is None else 0
        state = advance(state, events.Measured(at, {"worker/0": TaskReport(phase, epoch, step, 0.0, figures=figures)}))

    report(102.0, "import of keras", 0)
    assert doing(state.members["worker/0"], 102.0) == "importing keras"
    assert progress(state) == "no step yet, importing keras"
    report(105.0, "gradients", 1, 0)
    assert state.members["worker/0"].is_preparing
    first = "first step (JAX and TensorFlow compile the model)"
    assert doing(state.members["worker/0"], 105.0) == f"{first}, epoch 1, step 1"
    assert progress(state) == f"no step yet, {first}"
    report(106.0, "update", 11, 10)
    member = state.members["worker/0"]
    assert (member.is_preparing, member.prepared_s, member.computed_s) == (False, 4.0, 5.0)
    assert (member.steps_per_s, member.compute_s) == (10.0, 0.1)
    assert doing(member, 106.0) == "update, epoch 1, step 11"


def test_a_job_that_validates_has_taken_its_steps() -> None:
    stream = [*begin(), *(measured(101.0 + second, 20 * second) for second in range(3))]
    quiet = {task: TaskReport("evaluate", None, None, 0.0, figures=WorkerFigures(steps=40)) for task in TASKS}
    state = replay([*stream, *(events.Measured(104.0 + second, quiet) for second in range(8))])
    assert state.steps_per_s == 0.0
    assert progress(state) == "40 steps, evaluating"
    assert position(state) == "epoch 1"
    assert progress(replay(stream)) == "20 steps/s"


def test_a_job_ends_with_its_last_figures_however_soon_they_came() -> None:
    state = replay([*begin(), measured(101.0, 10, loss=2.0), measured(102.0, 87, loss=1.0)])
    assert position(state) == "epoch 1, step 88"
    known = WorkerFigures(steps=88, samples=880, total_epochs=3)
    state = advance(state, events.Measured(102.05, {"worker/0": TaskReport("update", 0, 87, 0.0, figures=known)}))
    assert position(state) == "epoch 1 of 3, step 88"
    last = {task: TaskReport("update", None, None, 0.0, figures=WorkerFigures(steps=90)) for task in TASKS}
    for event in (
        events.Measured(102.1, last),
        events.EpochFinished(102.1, 0, {"loss": 0.5, "val_loss": 0.7}),
        *(events.TaskExited(102.2, task, 0, "ended with exit code 0") for task in TASKS),
        events.JobEnded(102.3, 0, "all tasks ended without error"),
    ):
        state = advance(state, event)
    assert (state.steps, state.epoch, position(state), state.logs) == (90, 0, "epoch 1 of 3", {"loss": 0.5})
    assert (state.history[-1].step, state.history[-1].logs, state.epochs[-1].step) == (90, {"loss": 0.5}, 90)


def test_a_short_job_has_the_rates_of_its_only_report() -> None:
    figures = WorkerFigures(computed_s=0.3, waited_s=0.1, steps=4, samples=40)
    report = TaskReport("update", 0, 3, 0.0, figures=figures)
    state = replay([*begin(), events.Measured(102.0, {"worker/0": report})])
    assert (state.samples_per_s, state.history[-1].samples_per_s) == (100.0, 100.0)
    state = advance(state, events.TaskExited(102.1, "worker/0", 1, "ended with exit code 1"))
    assert position(advance(state, events.JobEnded(102.2, 1, "worker/0 failed", "worker/0"))) == "epoch 1, step 4"


def test_names_of_phases_are_those_that_workers_report() -> None:
    assert (preparation.IMPORT_OF, preparation.FIRST_STEP) == (worker_progress.IMPORT_OF, start_phases.FIRST_STEP)


def test_of_servers_the_updates_count() -> None:
    tasks = ["worker/0", "ps/0"]
    state = replay(begin(events.SERVERS, tasks))
    for second in range(4):
        server = WorkerFigures(server=ServerFigures(50 * second, 1))
        worker = WorkerFigures(steps=10 * second)
        reports = {
            "worker/0": TaskReport("push", 0, 10 * second, 0.0, figures=worker),
            "ps/0": TaskReport("serves", None, None, 0.0, figures=server),
        }
        state = advance(state, events.Measured(101.0 + second, reports))
    assert state.members["ps/0"].updates_per_s == state.steps_per_s == 50.0
    assert state.steps == 150


def test_what_a_server_has_restored_is_no_step() -> None:
    tasks = ["worker/0", "ps/0", "ps/1"]
    state = replay(begin(events.SERVERS, tasks))

    def served(at: float, **versions: int) -> events.Measured:
        figures = {f"ps/{name[-1]}": WorkerFigures(server=ServerFigures(each, 1)) for name, each in versions.items()}
        reports = {task: TaskReport("serves", None, None, 0.0, figures=each) for task, each in figures.items()}
        return events.Measured(at, reports)

    for event in (
        served(101.0, ps0=10),
        served(101.5, ps1=30),
        served(102.0, ps0=50),
        events.TaskExited(103.0, "ps/0", 137, "was killed by SIGKILL"),
        events.TaskExited(103.0, "ps/1", 137, "was killed by SIGKILL"),
        events.TaskStarted(104.0, "ps/0", 1, "host", 20),
        events.TaskStarted(104.0, "ps/1", 2, "host", 21),
        served(105.0, ps0=0, ps1=45),
        served(106.0, ps0=45, ps1=50),
        served(107.0, ps0=52, ps1=51),
    ):
        state = advance(state, event)
    assert state.steps == 57  # the 5 updates that were lost and made again count twice


def test_the_state_stays_small_however_long_a_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_view, "MAX_POINTS", 50)
    state = replay(begin())
    for second in range(1000):
        state = advance(state, measured(101.0 + second, second + 1))
        state = advance(state, events.Noticed(101.0 + second, "again"))
    assert len(state.history) <= 50
    assert state.history[-1].at - state.history[0].at > 900
    assert (state.interval_s, state.thinned) == (32.0, 5)
    assert len(state.feed) == job_view.MAX_FEED


def test_a_job_ends_with_its_cause_or_begins_again() -> None:
    state = replay([*begin(), measured(101.0, 1)])
    assert state.status == RUNNING
    again = advance(state, begin()[0])
    assert (again.restarts, again.began_at, again.feed[-1].text) == (1, 100.0, "the whole job starts again")
    failed = advance(state, events.JobEnded(105.0, 1, "worker/1 failed with ValueError", "worker/1", "page"))
    assert (failed.status, failed.ended_at, failed.feed[-1].level) == (FAILED, 105.0, job_view.BAD)
    assert advance(state, events.JobEnded(105.0, 0, "all workers ended without error")).status == SUCCEEDED


@pytest.mark.parametrize(
    ("code", "task", "status", "text"),
    [
        (75, "", STOPPED, "saved a checkpoint and stopped; start it again to continue"),
        (130, "", STOPPED, "interrupted (Ctrl-C)"),
        (143, "", STOPPED, "interrupted (SIGTERM)"),
        (143, "worker/1", FAILED, "why"),
        (75, "worker/1", FAILED, "why"),
        (71, "", FAILED, "why"),
        (255, "", FAILED, "why"),
        (0, "", SUCCEEDED, "why"),
    ],
)
def test_a_job_that_was_stopped_has_not_failed(code: int, task: str, status: str, text: str) -> None:
    end = events.JobEnded(105.0, code, "why", task, "page")
    state = replay([*begin(), measured(101.0, 1), end])
    assert (state.status, describe_ending(end)) == (status, text)
    assert (state.feed[-1].level == job_view.BAD) == (status == FAILED)


def test_a_task_that_leaves_a_job_that_was_stopped_has_not_failed() -> None:
    state = replay([*begin(), measured(101.0, 1), events.TaskExited(102.0, "worker/0", 75, "ended with exit code 75")])
    assert not state.members["worker/0"].has_failed


def test_what_cannot_be_done_is_said_with_its_reason() -> None:
    fixed = replay([*begin(), measured(101.0, 1)])
    assert why_not(fixed, "stop") == ""
    assert "phalanx.callbacks.Checkpoint" in why_not(fixed, "checkpoint")
    assert "--workers MIN:MAX" in why_not(fixed, "scale")
    elastic = replay([*begin(events.ELASTIC), measured(101.0, 1, saves=True)])
    assert why_not(elastic, "checkpoint") == why_not(elastic, "scale") == ""
    assert why_not(elastic, "drain") == "The job has no other host."
    hosts = [HostStatus("a", 1, 1), HostStatus("b", 1, 1)]
    assert why_not(advance(elastic, events.HostsChanged(102.0, hosts)), "drain") == ""
    ended = advance(elastic, events.JobEnded(103.0, 0, "over"))
    assert {why_not(ended, action) for action in ("stop", "checkpoint", "scale", "drain")} == {"The job has ended."}


def test_the_state_travels_as_json_and_a_loss_that_is_not_a_number_too() -> None:
    state = replay([*begin(), measured(101.0, 1), measured(102.0, 2)])
    state = advance(state, events.EpochFinished(103.0, 0, {"loss": None, "val_loss": 1.0}))
    assert msgspec.json.decode(msgspec.json.encode(state), type=JobView) == state
    assert state.epochs[-1].logs == {"loss": None, "val_loss": 1.0}
