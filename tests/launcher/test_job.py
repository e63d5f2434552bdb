"""How a job is ended: decided by the clock, without processes."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Sequence

from phalanx.errors import EvictedError
from phalanx.launcher.job import Job, Placement, Step, after_failure, after_signal
from phalanx.launcher.messages import Event, Exited, LastWords, Order, Output, Started
from phalanx.launcher.restarts import Restarts
from phalanx.launcher.verdict import End


class FakeHost:
    """Workers that do what a script of events says, and die of the signals that `mortal` names."""

    name = "fake"
    needs_polling = True

    def __init__(self, script: list[list[Event]], mortal: tuple[int, ...] = (signal.SIGKILL,)):
        self._script = script
        self._mortal = mortal
        self._pending: list[Event] = []
        self.calls: list[tuple[str, int, int]] = []
        self.closed = False

    def start(self, orders: list[Order]) -> list[Event]:
        return [Started(order.rank, 100 + order.rank) for order in orders]

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
            self._pending.append(Exited(rank, -number, LastWords()))

    def close(self) -> None:
        self.closed = True


class Recorder:
    def __init__(self) -> None:
        self.text: list[tuple[int, bool, bytes]] = []
        self.failures: list[int] = []
        self.returned: list[str] = []
        self.late: Sequence[str] = ()

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        self.text.append((rank, is_error, data))

    def started(self, rank: int, pid: int) -> None:
        pass

    def exited(self, end: End) -> None:
        pass

    def returns(self, end: End, count: str) -> None:
        self.returned.append(f"{end.task} {count}")

    def failed(self, end: End) -> None:
        self.failures.append(end.rank)

    def overdue(self, tasks: Sequence[str], seconds: float) -> None:
        self.late = tasks


class Clock:
    """Each look at it is a tenth of a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def make(host: FakeHost, workers: int = 2, restarts: int = 0) -> tuple[Job, Recorder]:
    recorder = Recorder()
    orders = [Order(rank, (), {}, returns=restarts > 0) for rank in range(workers)]
    placements = [Placement(order, f"worker/{order.rank}", host) for order in orders]
    return Job(placements, selectors.DefaultSelector(), recorder, restarts=restarts, clock=Clock()), recorder


def done(rank: int, code: int = 0) -> Exited:
    return Exited(rank, code, LastWords())


def test_a_job_ends_when_all_workers_have() -> None:
    host = FakeHost([[Output(0, False, b"x")], [done(1)], [done(0)]])
    job, recorder = make(host)
    job.start()
    outcome = job.run()
    assert outcome.verdict.success
    assert [end.rank for end in outcome.ends] == [0, 1]
    assert [end.pid for end in outcome.ends] == [100, 101]
    assert recorder.text == [(0, False, b"x")]
    assert host.calls == []
    assert host.closed


def test_survivors_that_end_by_themselves_get_no_signal() -> None:
    host = FakeHost([[done(1, 5)], [done(0, 71)]])
    job, recorder = make(host)
    job.start()
    assert job.run().verdict.code == 5
    assert host.calls == []
    assert recorder.failures == [1]


def test_survivors_that_hang_are_asked_for_stacks_then_ended_then_killed() -> None:
    host = FakeHost([[done(1, 5)]])
    job, _ = make(host)
    job.start()
    outcome = job.run()
    assert host.calls == [("dump", 0, 0), ("signal", 0, signal.SIGTERM), ("signal", 0, signal.SIGKILL)]
    assert outcome.ends[0].hung
    assert outcome.ends[0].by_launcher
    assert outcome.verdict.cause is not None
    assert outcome.verdict.cause.rank == 1


def test_a_process_that_even_sigkill_does_not_end_is_given_up() -> None:
    host = FakeHost([[done(1, 5)]], mortal=())
    job, _ = make(host)
    job.start()
    assert job.run().verdict.code == 5
    assert host.closed


def test_ctrl_c_takes_the_stacks_before_it_interrupts() -> None:
    host = FakeHost([], mortal=(signal.SIGINT,))
    job, _ = make(host)
    job.start()
    job.stop(signal.SIGINT)
    assert job.run().verdict.code == 130
    assert host.calls == [
        ("dump", 0, 0),
        ("dump", 1, 0),
        ("signal", 0, signal.SIGINT),
        ("signal", 1, signal.SIGINT),
    ]


def test_ctrl_c_twice_kills_at_once() -> None:
    host = FakeHost([])
    job, _ = make(host, workers=1)
    job.start()
    job.stop(signal.SIGINT)
    job.stop(signal.SIGINT)
    assert job.run().verdict.code == 130
    assert host.calls == [("signal", 0, signal.SIGKILL)]


def test_a_failure_before_ctrl_c_stays_the_reason() -> None:
    host = FakeHost([[done(1, 5)], [], []])
    job, recorder = make(host)
    job.start()
    recorder.failed = lambda end: job.stop(signal.SIGINT)  # type: ignore[method-assign]
    assert job.run().verdict.code == 5


def test_the_steps_come_in_order_and_end() -> None:
    for schedule in (
        after_failure(10.0),
        after_signal(10.0, signal.SIGINT),
        after_signal(10.0, signal.SIGTERM),
    ):
        times = [time for time, _ in schedule]
        assert times == sorted(times)
        assert times[0] >= 10.0
        assert [step for _, step in schedule][-2:] == [Step.KILL, Step.GIVE_UP]


def test_a_killed_task_is_started_again() -> None:
    host = FakeHost([[], [done(1, -signal.SIGKILL)], [], [], [done(1)], [done(0)]])
    job, recorder = make(host, restarts=2)
    job.start()
    outcome = job.run()
    assert outcome.verdict.success
    assert [end.pid for end in outcome.ends] == [100, 201]
    assert host.calls == [("restart", 1, 0)]
    assert recorder.returned == ["worker/1 1 of 2"]


def test_a_task_that_fails_by_itself_is_not_started_again() -> None:
    host = FakeHost([[done(1, 5)], [done(0, 71)]])
    job, recorder = make(host, restarts=2)
    job.start()
    assert job.run().verdict.code == 5
    assert recorder.returned == []


def test_a_task_is_not_started_again_when_the_first_has_finished() -> None:
    host = FakeHost([[done(0)], [done(1, -signal.SIGKILL)]])
    job, _ = make(host, restarts=2)
    job.start()
    assert job.run().verdict.code == 128 + signal.SIGKILL
    assert ("restart", 1, 0) not in host.calls


def test_nobody_is_started_again_while_the_job_ends() -> None:
    host = FakeHost([[done(1, 5)]])  # worker 0 is then killed by the launcher
    job, recorder = make(host, restarts=2)
    job.start()
    assert job.run().verdict.code == 5
    assert recorder.returned == []


def test_a_task_that_waits_to_be_started_again_has_ended_when_another_fails() -> None:
    kills = [[done(1, -signal.SIGKILL)], [done(1, -signal.SIGKILL), done(0, 5)]]
    host = FakeHost(kills)
    job, recorder = make(host, restarts=5)
    job.start()
    outcome = job.run()
    assert len(outcome.ends) == 2
    assert recorder.failures == [0]


class TestRestarts:
    def test_only_what_a_signal_killed_returns(self) -> None:
        restarts = Restarts(3)
        assert restarts.delay_s(0, -signal.SIGKILL, 100.0) == 0.0
        assert restarts.delay_s(0, 1, 100.0) is None
        assert restarts.delay_s(0, 0, 100.0) is None
        assert restarts.delay_s(0, None, 100.0) is None

    def test_as_often_as_allowed_for_each_task(self) -> None:
        restarts = Restarts(2)
        assert [restarts.delay_s(0, -9, 100.0) for _ in range(3)] == [0.0, 0.0, None]
        assert restarts.delay_s(1, -9, 100.0) == 0.0
        assert restarts.describe(1) == "1 of 2"

    def test_one_that_dies_at_once_waits_longer_and_is_given_up(self) -> None:
        restarts = Restarts(10)
        assert [restarts.delay_s(0, -9, 1.0) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, None]

    def test_a_long_life_makes_up_for_short_ones(self) -> None:
        restarts = Restarts(10)
        assert [restarts.delay_s(0, -9, lived) for lived in (1.0, 1.0, 60.0, 1.0)] == [0.0, 0.5, 0.0, 0.0]


def with_evaluator(host: FakeHost, grace_s: float = 5) -> tuple[Job, Recorder]:
    recorder = Recorder()
    tasks = ("worker/0", "ps/0", "evaluator/0")
    placements = [Placement(Order(rank, (), {}), task, host) for rank, task in enumerate(tasks)]
    return Job(placements, selectors.DefaultSelector(), recorder, evaluator_grace_s=grace_s, clock=Clock()), recorder


def test_an_evaluator_may_finish_after_the_others() -> None:
    host = FakeHost([[done(0)], [done(1)], [], [], [done(2)]])
    job, recorder = with_evaluator(host)
    job.start()
    assert job.run().verdict.success
    assert host.calls == []
    assert recorder.late == ()


def test_an_evaluator_that_does_not_finish_is_ended_and_the_job_is_a_success() -> None:
    host = FakeHost([[done(0)], [done(1)]])
    job, recorder = with_evaluator(host)
    job.start()
    outcome = job.run()
    assert outcome.verdict.success
    assert recorder.late == ["evaluator/0"]
    assert host.calls == [("signal", 2, signal.SIGTERM), ("signal", 2, signal.SIGKILL)]


def test_an_evaluator_that_fails_after_the_others_fails_the_job() -> None:
    host = FakeHost([[done(0)], [done(1)], [done(2, 3)]])
    job, recorder = with_evaluator(host)
    job.start()
    assert job.run().verdict.code == 3
    assert recorder.failures == [2]


def test_a_server_that_still_runs_is_not_waited_for_with_the_evaluators_patience() -> None:
    host = FakeHost([[done(0)], *[[]] * 30, [done(1)], [done(2)]])
    job, recorder = with_evaluator(host, grace_s=1)
    job.start()
    assert job.run().verdict.success
    assert recorder.late == ()


def of_servers(host: FakeHost) -> tuple[Job, Recorder]:
    recorder = Recorder()
    tasks = ("worker/0", "worker/1", "ps/0")
    placements = [Placement(Order(rank, (), {}, returns=True), task, host) for rank, task in enumerate(tasks)]
    clock = Clock()
    return Job(
        placements, selectors.DefaultSelector(), recorder, evaluator_grace_s=5, restarts=1, clock=clock
    ), recorder


def test_a_worker_that_was_left_out_and_is_stopped_does_not_keep_the_job() -> None:
    host = FakeHost([[done(0)], [done(2)]])
    job, recorder = of_servers(host)
    job.start()
    assert job.run().verdict.success
    assert recorder.late == ["worker/1"]


def test_a_worker_that_was_left_out_is_started_again_or_forgotten() -> None:
    host = FakeHost([[done(1, EvictedError.exit_code)], [], [done(0)], [done(1, EvictedError.exit_code)], [done(2)]])
    job, recorder = of_servers(host)
    job.start()
    assert job.run().verdict.success
    assert recorder.returned == ["worker/1 1 of 1"]
