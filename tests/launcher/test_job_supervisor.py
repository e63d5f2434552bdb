"""How a job is ended: decided by the clock, without processes."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Sequence

import pytest

from phalanx.config.launch_config import LaunchConfig
from phalanx.errors import EvictedError, LinkTimeoutError, PeerLostError, RendezvousError
from phalanx.launcher import job_runner
from phalanx.launcher import job_supervisor as job_module
from phalanx.launcher.failures.root_cause import RootCause, WorkerExit
from phalanx.launcher.host_messages import (
    CheckpointBeforeExit,
    Event,
    Exited,
    Output,
    Started,
    WorkerDiagnostics,
    WorkerSpec,
)
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.launcher.job_observer import JobObserver
from phalanx.launcher.job_supervisor import JobOutcome, JobSupervisor
from phalanx.launcher.restart_policy import RestartPolicy
from phalanx.runtime.crash_report import CrashReport


class FakeHost:
    """Workers that do what a script of events says, and die of the signals that `mortal` names."""

    name = "fake"
    needs_polling = True
    lost = False

    def __init__(self, script: list[list[Event]], mortal: tuple[int, ...] = (signal.SIGKILL,)):
        self._script = script
        self._mortal = mortal
        self._pending: list[Event] = []
        self.calls: list[tuple[str, int, int]] = []
        self.closed = False
        self.counts_starts = False

    def start(self, specs: list[WorkerSpec]) -> list[Event]:
        self.calls += [("start", spec.rank, 0) for spec in specs if self.counts_starts]
        return [Started(spec.rank, 100 + spec.rank) for spec in specs]

    def events(self) -> list[Event]:
        events = self._pending + (self._script.pop(0) if self._script else [])
        self._pending = []
        return events

    def restart(self, rank: int) -> Event:
        self.calls.append(("restart", rank, 0))
        return Started(rank, 200 + rank)

    def dump_stacks(self, rank: int) -> None:
        self.calls.append(("dump", rank, 0))

    def signal(self, rank: int, number: int) -> None:
        self.calls.append(("signal", rank, number))
        if number in self._mortal:
            self._pending.append(Exited(rank, -number, WorkerDiagnostics()))

    def close(self) -> None:
        self.closed = True


class Recorder(JobObserver):
    def __init__(self) -> None:
        self.text: list[tuple[int, bool, bytes]] = []
        self.failures: list[int] = []
        self.returned: list[str] = []
        self.late: Sequence[str] = ()
        self.behind: list[str] = []

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        self.text.append((rank, is_error, data))

    def job_failed(self, end: WorkerExit) -> None:
        self.failures.append(end.rank)

    def exit_survived(self, end: WorkerExit, how: str) -> None:
        restart = how.removeprefix("starting it again (").removesuffix(")")
        self.returned += [f"{end.task} {restart}"] if restart != how else []
        self.behind += [end.task] if restart == how else []

    def message(self, text: str) -> None:
        names, is_late, _ = text.partition(" still runs ")
        self.late = names.split(", ") if is_late else self.late


class Clock:
    """Each look at it is a tenth of a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def make(host: FakeHost, workers: int = 2, restarts: int = 0) -> tuple[JobSupervisor, Recorder]:
    recorder = Recorder()
    specs = [WorkerSpec(rank, (), {}, restartable=restarts > 0) for rank in range(workers)]
    placements = [WorkerPlacement(spec, f"worker/{spec.rank}", host) for spec in specs]
    return JobSupervisor(
        placements, selectors.DefaultSelector(), recorder, LaunchConfig(restarts=restarts), clock=Clock()
    ), recorder


def done(rank: int, code: int | None = 0) -> Exited:
    return Exited(rank, code, WorkerDiagnostics())


def test_a_job_ends_when_all_workers_have() -> None:
    host = FakeHost([[Output(0, False, b"x")], [done(1)], [done(0)]])
    job, recorder = make(host)
    job.start()
    outcome = job.run()
    assert outcome.root_cause.success
    assert [end.rank for end in outcome.exits] == [0, 1]
    assert [end.pid for end in outcome.exits] == [100, 101]
    assert recorder.text == [(0, False, b"x")]
    assert host.calls == []
    assert host.closed


def test_survivors_that_end_by_themselves_get_no_signal() -> None:
    host = FakeHost([[done(1, 5)], [done(0, 71)]])
    job, recorder = make(host)
    job.start()
    assert job.run().root_cause.code == 5
    assert host.calls == []
    assert recorder.failures == [1]


def test_survivors_that_hang_are_asked_for_stacks_then_ended_then_killed() -> None:
    host = FakeHost([[done(1, 5)]])
    job, _ = make(host)
    job.start()
    outcome = job.run()
    assert host.calls == [("dump", 0, 0), ("signal", 0, signal.SIGTERM), ("signal", 0, signal.SIGKILL)]
    assert outcome.exits[0].is_hung
    assert outcome.exits[0].was_ended_by_launcher
    assert outcome.root_cause.cause is not None
    assert outcome.root_cause.cause.rank == 1


def test_a_process_that_even_sigkill_does_not_end_is_given_up() -> None:
    host = FakeHost([[done(1, 5)]], mortal=())
    job, _ = make(host)
    job.start()
    assert job.run().root_cause.code == 5
    assert host.closed


def test_ctrl_c_takes_the_stacks_before_it_interrupts() -> None:
    host = FakeHost([], mortal=(signal.SIGINT,))
    job, _ = make(host)
    job.start()
    job.stop(signal.SIGINT)
    assert job.run().root_cause.code == 130
    assert host.calls == [
        ("dump", 0, 0),
        ("dump", 1, 0),
        ("signal", 0, signal.SIGINT),
        ("signal", 1, signal.SIGINT),
    ]


@pytest.mark.parametrize(("first", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_after_a_signal_kills_at_once(first: signal.Signals, code: int) -> None:
    host = FakeHost([])
    job, _ = make(host, workers=1)
    job.start()
    job.stop(first)
    job.stop(signal.SIGINT)
    assert job.run().root_cause.code == code
    assert host.calls == [("signal", 0, signal.SIGKILL)]


def test_a_signal_that_is_repeated_takes_no_time_from_a_checkpoint() -> None:
    host = FakeHost([[], [], [CheckpointBeforeExit(0)], *([[]] * 30), [done(0)]])
    job, _ = make(host, workers=1)
    job.start()
    job.stop(signal.SIGTERM)
    job.stop(signal.SIGTERM)
    job.stop(signal.SIGHUP)
    job.run()
    assert host.calls == [("dump", 0, 0), ("signal", 0, signal.SIGTERM)]


def test_a_failure_before_ctrl_c_stays_the_reason() -> None:
    host = FakeHost([[done(1, 5)], [], []])
    job, recorder = make(host)
    job.start()
    recorder.job_failed = lambda end: job.stop(signal.SIGINT)  # type: ignore[method-assign]
    assert job.run().root_cause.code == 5


def test_a_killed_task_is_started_again() -> None:
    host = FakeHost([[], [done(1, -signal.SIGKILL)], [], [], [done(1)], [done(0)]])
    job, recorder = make(host, restarts=2)
    job.start()
    outcome = job.run()
    assert outcome.root_cause.success
    assert [end.pid for end in outcome.exits] == [100, 201]
    assert host.calls == [("restart", 1, 0)]
    assert recorder.returned == ["worker/1 1 of 2"]


def test_a_task_that_fails_by_itself_is_not_started_again() -> None:
    host = FakeHost([[done(1, 5)], [done(0, 71)]])
    job, recorder = make(host, restarts=2)
    job.start()
    assert job.run().root_cause.code == 5
    assert recorder.returned == []


def test_a_task_is_not_started_again_when_the_first_has_finished() -> None:
    host = FakeHost([[done(0)], [done(1, -signal.SIGKILL)]])
    job, _ = make(host, restarts=2)
    job.start()
    assert job.run().root_cause.code == 128 + signal.SIGKILL
    assert ("restart", 1, 0) not in host.calls


def test_nobody_is_started_again_while_the_job_ends() -> None:
    host = FakeHost([[done(1, 5)]])  # worker 0 is then killed by the launcher
    job, recorder = make(host, restarts=2)
    job.start()
    assert job.run().root_cause.code == 5
    assert recorder.returned == []


def test_a_task_that_waits_to_be_started_again_has_ended_when_another_fails() -> None:
    kills = [[done(1, -signal.SIGKILL)], [done(1, -signal.SIGKILL), done(0, 5)]]
    host = FakeHost(kills)
    job, recorder = make(host, restarts=5)
    job.start()
    outcome = job.run()
    assert len(outcome.exits) == 2
    assert recorder.failures == [0]


class TestRestarts:
    def test_only_what_a_signal_killed_returns(self) -> None:
        restarts = RestartPolicy(3)
        assert restarts.delay_s(0, -signal.SIGKILL, 100.0) == 0.0
        assert restarts.delay_s(0, 1, 100.0) is None
        assert restarts.delay_s(0, 0, 100.0) is None
        assert restarts.delay_s(0, None, 100.0) is None

    def test_as_often_as_allowed_for_each_task(self) -> None:
        restarts = RestartPolicy(2)
        assert [restarts.delay_s(0, -9, 100.0) for _ in range(3)] == [0.0, 0.0, None]
        assert restarts.delay_s(1, -9, 100.0) == 0.0
        assert restarts.describe(1) == "1 of 2"

    def test_one_that_dies_at_once_waits_longer_and_is_given_up(self) -> None:
        restarts = RestartPolicy(10)
        assert [restarts.delay_s(0, -9, 1.0) for _ in range(7)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, None]

    def test_a_long_life_makes_up_for_short_ones(self) -> None:
        restarts = RestartPolicy(10)
        assert [restarts.delay_s(0, -9, lived) for lived in (1.0, 1.0, 60.0, 1.0)] == [0.0, 0.5, 0.0, 0.0]


def with_evaluator(host: FakeHost, grace_s: float = 5) -> tuple[JobSupervisor, Recorder]:
    recorder = Recorder()
    tasks = ("worker/0", "ps/0", "evaluator/0")
    placements = [WorkerPlacement(WorkerSpec(rank, (), {}), task, host) for rank, task in enumerate(tasks)]
    return JobSupervisor(
        placements, selectors.DefaultSelector(), recorder, LaunchConfig(evaluator_grace_s=grace_s), clock=Clock()
    ), recorder


def test_an_evaluator_may_finish_after_the_others() -> None:
    host = FakeHost([[done(0)], [done(1)], [], [], [done(2)]])
    job, recorder = with_evaluator(host)
    job.start()
    assert job.run().root_cause.success
    assert host.calls == []
    assert recorder.late == ()


def test_an_evaluator_that_does_not_finish_is_ended_and_the_job_is_a_success() -> None:
    host = FakeHost([[done(0)], [done(1)]])
    job, recorder = with_evaluator(host)
    job.start()
    outcome = job.run()
    assert outcome.root_cause.success
    assert recorder.late == ["evaluator/0"]
    assert host.calls == [("signal", 2, signal.SIGTERM), ("signal", 2, signal.SIGKILL)]


def test_an_evaluator_that_fails_after_the_others_fails_the_job() -> None:
    host = FakeHost([[done(0)], [done(1)], [done(2, 3)]])
    job, recorder = with_evaluator(host)
    job.start()
    assert job.run().root_cause.code == 3
    assert recorder.failures == [2]


def test_a_server_that_still_runs_is_not_waited_for_with_the_evaluators_patience() -> None:
    host = FakeHost([[done(0)], *[[]] * 30, [done(1)], [done(2)]])
    job, recorder = with_evaluator(host, grace_s=1)
    job.start()
    assert job.run().root_cause.success
    assert recorder.late == ()


def of_servers(
    host: FakeHost, tasks: tuple[str, ...] = ("worker/0", "worker/1", "ps/0"), restarts: int = 1
) -> tuple[JobSupervisor, Recorder]:
    recorder = Recorder()
    placements = [
        WorkerPlacement(WorkerSpec(rank, (), {}, restartable=True, trains=not task.startswith("ps")), task, host)
        for rank, task in enumerate(tasks)
    ]
    clock = Clock()
    return JobSupervisor(
        placements,
        selectors.DefaultSelector(),
        recorder,
        LaunchConfig(evaluator_grace_s=5, restarts=restarts),
        clock=clock,
    ), recorder


def test_a_worker_that_was_left_out_and_is_stopped_does_not_keep_the_job() -> None:
    host = FakeHost([[done(0)], [done(2)]])
    job, recorder = of_servers(host)
    job.start()
    assert job.run().root_cause.success
    assert recorder.late == ["worker/1"]


def test_a_worker_that_was_left_out_is_started_again_or_forgotten() -> None:
    host = FakeHost([[done(1, EvictedError.exit_code)], [], [done(0)], [done(1, EvictedError.exit_code)], [done(2)]])
    job, recorder = of_servers(host)
    job.start()
    assert job.run().root_cause.success
    assert recorder.returned == ["worker/1 1 of 1"]


@pytest.mark.parametrize(("code", "success"), [(PeerLostError.exit_code, True), (1, False)])
def test_a_worker_that_wakes_when_all_is_over_has_lost_nobody(code: int, success: bool) -> None:
    host = FakeHost([[done(0)], [done(2)], [done(1, code)]])
    job, _ = of_servers(host)
    job.start()
    assert job.run().root_cause.success is success


def without(rank: int, task: str = "", *, silent: str = "") -> Exited:
    """The end of a task that lost another, or to which another did not answer."""
    code = PeerLostError.exit_code if task else LinkTimeoutError.exit_code
    return Exited(
        rank, code, WorkerDiagnostics(error=CrashReport("Error", "gone", "...", task or None, code, silent=silent))
    )


LATE = WorkerDiagnostics(error=CrashReport("RendezvousError", "late", "...", code=RendezvousError.exit_code))


@pytest.mark.parametrize("end", [without(1, "ps/0"), without(1, silent="ps/0")])
def test_a_worker_that_does_not_reach_the_servers_is_started_again_and_then_gone_on_without(end: Exited) -> None:
    host = FakeHost([[end], [], [Exited(1, RendezvousError.exit_code, LATE)], [], [done(0)], [done(2)]])
    job, recorder = of_servers(host)
    job.start()
    assert job.run().root_cause.success
    assert recorder.returned == ["worker/1 1 of 1"]
    assert recorder.behind == ["worker/1"]
    assert recorder.failures == []


def of_a_coordinator(host: FakeHost, restarts: int = 1) -> tuple[JobSupervisor, Recorder]:
    return of_servers(host, ("chief/0", "worker/0", "ps/0", "worker/1"), restarts)


def test_a_worker_that_alone_does_not_reach_the_chief_is_started_again_and_then_gone_on_without() -> None:
    late = Exited(1, RendezvousError.exit_code, LATE)
    host = FakeHost([[without(1, "chief/0")], [], [late], [], [late], [], [done(0)], [done(2)], [done(3)]])
    job, recorder = of_a_coordinator(host, restarts=2)
    job.start()
    assert job.run().root_cause.success
    assert recorder.returned == ["worker/0 1 of 2", "worker/0 2 of 2"]
    assert recorder.behind == ["worker/0"]


def test_when_no_worker_reaches_the_chief_the_job_ends() -> None:
    host = FakeHost([[without(1, "chief/0"), without(3, "chief/0")], [done(0, 71), done(2, 71)]])
    job, recorder = of_a_coordinator(host)
    job.start()
    assert job.run().root_cause.code == PeerLostError.exit_code
    assert recorder.failures == [3]


def test_the_host_of_a_worker_among_servers_is_gone_on_without() -> None:
    host = FakeHost([[done(1, None)], [], [done(0)], [done(2)]])
    job, recorder = of_servers(host)
    job.start()
    assert job.run().root_cause.success
    assert (recorder.returned, recorder.behind) == ([], ["worker/1"])


def test_a_host_that_is_lost_while_the_job_ends_may_be_the_cause() -> None:
    host = FakeHost([[without(0, "worker/1")], [done(1, None)], [done(2, PeerLostError.exit_code)]])
    job, _ = of_servers(host)
    job.start()
    cause = job.run().root_cause.cause
    assert cause is not None
    assert cause.task == "worker/1"


@pytest.mark.parametrize("end", [without(0, "ps/0"), without(1, "worker/0"), done(1, RendezvousError.exit_code)])
def test_a_job_does_not_go_on_without_its_chief_or_before_it_was_whole(end: Exited) -> None:
    host = FakeHost([[end], [done(1 - end.rank, PeerLostError.exit_code), done(2, PeerLostError.exit_code)]])
    job, recorder = of_servers(host)
    job.start()
    assert job.run().root_cause.code == end.returncode
    assert recorder.failures == [end.rank]


class Seats:
    """A pool of hosts that does as it is told."""

    def __init__(self, *, keeps: bool = True):
        self.keeps = keeps
        self.heard: list[tuple[str, int, bool]] = []
        self.moves: dict[int, FakeHost] = {}
        self.early: set[str] = set()  # tasks that have left early, whatever their exit code
        self.job: JobSupervisor | None = None

    def task_failed(self, task: str) -> None: ...

    def has_left_early(self, task: str) -> bool:
        return task in self.early

    def keep_or_free_slot(self, rank: int, *, failed: bool) -> bool:
        self.heard.append(("left", rank, failed))
        return self.keeps

    def retire(self, rank: int) -> None:
        self.heard.append(("retired", rank, False))

    def set_target(self, workers: int) -> None:
        self.heard.append(("wanted", workers, False))

    def update(self) -> float | None:
        for rank, host in self.moves.items():
            if self.job is not None and self.job.accepts_workers and ("left", rank, True) in self.heard:
                self.job.start_worker(
                    WorkerPlacement(WorkerSpec(rank, (), {}, restartable=True), f"worker/{rank}", host)
                )
                self.moves = {}
        return None


def elastic(host: FakeHost, seats: Seats, *, workers: int = 2, restarts: int = 5) -> tuple[JobSupervisor, Recorder]:
    recorder = Recorder()
    placements = [
        WorkerPlacement(WorkerSpec(rank, (), {}, restartable=True), f"worker/{rank}", host) for rank in range(workers)
    ]
    job = JobSupervisor(
        placements, selectors.DefaultSelector(), recorder, LaunchConfig(restarts=restarts), slots=seats, clock=Clock()
    )
    seats.job = job
    return job, recorder


def test_a_worker_whose_place_is_good_is_started_again_there() -> None:
    host, seats = FakeHost([[done(1, 1)], [], [done(1), done(0)]]), Seats()
    job, recorder = elastic(host, seats)
    job.start()
    assert job.run().root_cause.success
    assert ("left", 1, True) in seats.heard
    assert host.calls[0] == ("restart", 1, 0)
    assert recorder.returned == ["worker/1 1 of 5"]


def test_a_worker_that_leaves_early_with_code_0_is_started_again() -> None:
    host, seats = FakeHost([[done(1)], [], [done(1, 1)], [], [done(1), done(0)]]), Seats()
    job, recorder = elastic(host, seats)
    seats.early.add("worker/1")
    job.training_changed(is_training=True)
    seats.update = lambda: seats.early.clear() if ("restart", 1, 0) in host.calls else None  # type: ignore[method-assign]
    job.start()
    assert job.run().root_cause.success
    assert [call for call in host.calls if call[0] == "restart"] == [("restart", 1, 0)] * 2
    assert recorder.returned == ["worker/1 1 of 5", "worker/1 2 of 5"]


@pytest.mark.parametrize("is_training", [True, False])
def test_a_member_that_ends_between_two_entries_does_not_end_the_next_one(is_training: bool) -> None:
    host, seats = FakeHost([[done(1)], [done(0, -signal.SIGKILL)], [], [done(2), done(0)]]), Seats()
    job, _ = elastic(host, seats, workers=3)
    job.training_changed(is_training=is_training)
    job.start()
    job.run()
    assert (("restart", 0, 0) in host.calls) == is_training


def test_a_worker_that_leaves_early_is_the_cause_if_the_job_ends_for_it() -> None:
    host, seats = FakeHost([[done(1)], [], [], [done(0, RendezvousError.exit_code)]]), Seats()
    job, _ = elastic(host, seats, restarts=0)
    seats.early.add("worker/1")

    def abort() -> None:
        if ("retired", 1, False) in seats.heard:
            job.abort("too few remain, and no other will be started", RendezvousError.exit_code)

    seats.update = abort  # type: ignore[method-assign]
    job.start()
    root_cause = job.run().root_cause
    assert root_cause.code == PeerLostError.exit_code
    assert root_cause.reason == "worker/1 left the job with exit code 0 while the others still depended on it"


def test_a_worker_that_is_lost_with_its_host_goes_to_another_one() -> None:
    host, seats = FakeHost([[done(1, None)], *[[]] * 5, [done(0)]]), Seats()
    other = FakeHost([[], [], [done(1)]])
    other.counts_starts = True
    seats.moves = {1: other}
    job, _ = elastic(host, seats)
    job.start()
    outcome = job.run()
    assert outcome.root_cause.success
    assert other.calls == [("start", 1, 0)]
    assert [end.returncode for end in outcome.exits] == [0, 0]
    assert other.closed


def test_a_seat_that_stays_vacant_is_nobodys_failure() -> None:
    host, seats = FakeHost([[done(1, -signal.SIGKILL)], [], [done(0)]]), Seats(keeps=False)
    job, _ = elastic(host, seats)
    job.start()
    outcome = job.run()
    assert outcome.root_cause.success
    assert [end.rank for end in outcome.exits] == [0]
    assert ("restart", 1, 0) not in host.calls


def test_the_last_member_that_is_lost_with_its_host_ends_the_job() -> None:
    host, seats = FakeHost([[done(1, None), done(0, None)]]), Seats()
    job, _ = elastic(host, seats)
    job.start()
    assert job.run().root_cause.code == 71


class GivingUpHost(FakeHost):
    """The job is given up when worker 1 is started again; both processes then find no other member."""

    job: JobSupervisor

    def restart(self, rank: int) -> Event:
        if rank == 1:
            self.job.loop.run_soon(lambda: self.job.abort("none is left", RendezvousError.exit_code))
            self._script = [[], [done(0, RendezvousError.exit_code), done(1, RendezvousError.exit_code)]]
        return super().restart(rank)


def test_an_elastic_job_that_is_given_up_ended_by_those_whom_it_lost() -> None:
    killed = -signal.SIGKILL
    host = GivingUpHost([[done(0, killed)], [], [], [], [], [], [done(1, killed)]])
    host.job, recorder = elastic(host, Seats())
    host.job.start()
    root_cause = host.job.run().root_cause
    assert [call for call in host.calls if call[0] == "restart"] == [("restart", 0, 0), ("restart", 1, 0)]
    assert recorder.returned == ["worker/0 1 of 5", "worker/1 1 of 5"]
    assert root_cause.code == 128 + signal.SIGKILL
    assert root_cause.cause is not None
    assert root_cause.cause.task == "worker/0"


def test_a_job_whose_workers_were_all_sent_away_has_not_succeeded() -> None:
    """Their hosts were taken back before others were there: it waits for those as long as its coordinator does."""
    host, seats = FakeHost([[done(0), done(1)]]), Seats()
    job, _ = elastic(host, seats)
    job.start()
    job.release("worker/0")
    job.release("worker/1")
    ticks = iter(range(100))

    def tick() -> float:
        if next(ticks) == 5:
            job.loop.run_soon(lambda: job.abort("none joined", RendezvousError.exit_code))
        return 0.0

    seats.update = tick  # type: ignore[method-assign]
    root_cause = job.run().root_cause
    assert next(ticks) > 5
    assert (root_cause.code, root_cause.reason) == (RendezvousError.exit_code, "none joined")


def test_a_job_that_is_over_does_not_wait_for_one_that_cannot_be_killed() -> None:
    host, seats = FakeHost([[done(0)]], mortal=()), Seats()
    job, _ = elastic(host, seats)
    job.start()
    job.loop.run_soon(lambda: job.finish(["worker/0"]))
    outcome = job.run()
    assert outcome.root_cause.success
    assert ("signal", 1, signal.SIGKILL) in host.calls


def test_one_that_is_not_wanted_and_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "RELEASE_S", 1.0)
    host, seats = FakeHost([]), Seats()
    job, _ = elastic(host, seats)
    job.start()
    job.release("worker/1")
    wants = host.events

    def events() -> list[Event]:
        killed = ("signal", 1, signal.SIGKILL) in host.calls
        return [*wants(), *([done(0)] if killed else [])]

    host.events = events  # type: ignore[method-assign]
    assert job.run().root_cause.success
    assert ("left", 1, False) in seats.heard


@pytest.mark.parametrize("absences", [1, 2, 3])
def test_hosts_that_were_there_are_waited_for_as_long_as_restarts_are_left(
    absences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_runner, "HOST_RETRY_S", 0.0)
    lost = JobOutcome(RootCause(PeerLostError.exit_code, None, "all members were lost at once"), [], {})
    done = JobOutcome(RootCause(0, None, "done"), [], {})
    attempts: list[int] = []

    def run_once(attempt: int) -> JobOutcome:
        attempts.append(attempt)
        if 1 <= attempt <= absences:
            raise RendezvousError("the host does not answer")
        return done if attempt else lost

    if absences == 3:  # one of the three restarts began after the loss
        with pytest.raises(RendezvousError):
            job_runner._run_with_restarts(run_once, lambda text: None, 3)
        assert attempts == [0, 1, 2, 3]
    else:
        assert job_runner._run_with_restarts(run_once, lambda text: None, 3) is done
        assert attempts == list(range(absences + 2))


def test_hosts_that_were_never_there_are_not_waited_for_again() -> None:
    def run_once(attempt: int) -> JobOutcome:
        raise RendezvousError("the host does not answer")

    with pytest.raises(RendezvousError):
        job_runner._run_with_restarts(run_once, pytest.fail, 3)


@pytest.mark.parametrize(
    ("root_cause", "runs"),
    [
        pytest.param(RootCause(PeerLostError.exit_code, None, "all members were lost at once"), 2, id="all were lost"),
        pytest.param(RootCause(RendezvousError.exit_code, None, "no other arrived"), 1, id="too few came"),
        pytest.param(RootCause(128 + signal.SIGTERM, None, "it was stopped", was_requested=True), 1, id="stopped"),
    ],
)
def test_a_job_that_lost_all_members_is_started_again(root_cause: RootCause, runs: int) -> None:
    outcomes = [JobOutcome(root_cause, [], {}), JobOutcome(RootCause(0, None, "done"), [], {})]
    attempts: list[int] = []

    def run_once(attempt: int) -> JobOutcome:
        attempts.append(attempt)
        return outcomes[attempt]

    said: list[str] = []
    outcome = job_runner._run_with_restarts(run_once, said.append, 3)
    assert attempts == list(range(runs))
    assert any(root_cause.reason in text for text in said) == (runs == 2)
    assert outcome is outcomes[runs - 1]
