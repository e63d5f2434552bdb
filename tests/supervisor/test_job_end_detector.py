"""When an evaluator takes a job for ended: decided from signs and times, without a job."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.cluster.peer_identification import PROBE, ProbeService
from phalanx.cluster.resolvers.tf_config import read_cluster
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.job_config import JobConfig
from phalanx.evaluator.job_end_detector import JobEndDetector, JobLiveness, JobProbe
from phalanx.transport.credentials import Credentials
from phalanx.transport.listener import Listener

BY_HAND = JobConfig(rendezvous_timeout_s=100, timeout_s=50)
LAUNCHED = JobConfig(rendezvous_timeout_s=100, timeout_s=50, has_explicit_job_id=True)
IDLE_S = 1000
EVALUATOR = Task("evaluator", 0)
SECRET = b"0123456789abcdef"


def over(end: JobEndDetector, *signs: tuple[JobLiveness, float], has_marker: bool | None = False) -> list[bool]:
    return [end.is_over(sign, now, has_marker=has_marker) for sign, now in signs]


def test_a_job_that_lives_is_not_over_however_long_it_takes() -> None:
    assert over(JobEndDetector(BY_HAND, IDLE_S, 0), (JobLiveness.ALIVE, 1), (JobLiveness.ALIVE, 99_999)) == [
        False,
        False,
    ]


def test_a_job_that_was_seen_is_over_when_nobody_listens_for_a_while() -> None:
    signs = [(JobLiveness.ALIVE, 5), (JobLiveness.STOPPED, 6), (JobLiveness.STOPPED, 65.9), (JobLiveness.STOPPED, 66)]
    assert over(JobEndDetector(BY_HAND, IDLE_S, 0), *signs) == [False, False, False, True]


def test_somebody_who_comes_back_in_time_goes_on() -> None:
    signs = [(JobLiveness.ALIVE, 5), (JobLiveness.STOPPED, 14), (JobLiveness.ALIVE, 73), (JobLiveness.STOPPED, 132)]
    assert over(JobEndDetector(BY_HAND, IDLE_S, 0), *signs) == [False] * 4


def test_somebody_who_does_not_answer_is_waited_for_longer() -> None:
    signs = [(JobLiveness.ALIVE, 5), (JobLiveness.UNRESPONSIVE, 104), (JobLiveness.UNRESPONSIVE, 105)]
    assert over(JobEndDetector(BY_HAND, IDLE_S, 0), *signs) == [False, False, True]


def test_who_does_not_answer_but_saves_is_there() -> None:
    end = JobEndDetector(BY_HAND, IDLE_S, 0)
    assert over(end, (JobLiveness.UNRESPONSIVE, 99)) == [False]
    end.record_checkpoint(99)
    signs = [(JobLiveness.UNRESPONSIVE, 198), (JobLiveness.STOPPED, 199), (JobLiveness.STOPPED, 259)]
    assert over(end, *signs) == [False, False, True]


def test_a_job_that_never_came_is_over_after_the_time_to_start() -> None:
    end = JobEndDetector(BY_HAND, IDLE_S, 0)
    assert over(end, (JobLiveness.STOPPED, 99), (JobLiveness.STOPPED, 100)) == [False, True]
    assert end.has_seen_nothing


def test_a_job_of_the_launcher_that_ended_before_the_first_look_is_over() -> None:
    end = JobEndDetector(LAUNCHED, IDLE_S, 0)
    end.record_checkpoint(20)
    assert over(end, (JobLiveness.STOPPED, 21), (JobLiveness.STOPPED, 23), (JobLiveness.STOPPED, 24)) == [
        False,
        False,
        True,
    ]
    assert not end.has_seen_nothing


def test_a_job_without_ports_is_over_when_it_saves_no_more() -> None:
    end = JobEndDetector(BY_HAND, IDLE_S, 0)
    end.record_checkpoint(90)
    assert over(end, (JobLiveness.STOPPED, 1089), (JobLiveness.STOPPED, 1090)) == [False, True]
    assert not end.has_seen_nothing


def test_what_a_file_says_counts_only_where_nobody_answers() -> None:
    for sign, ends in ((JobLiveness.ALIVE, False), (JobLiveness.UNRESPONSIVE, True), (JobLiveness.STOPPED, True)):
        end = JobEndDetector(BY_HAND, IDLE_S, 0)
        assert over(end, (JobLiveness.ALIVE, 1)) == [False]
        assert over(end, (sign, 2), has_marker=True) == [ends]


def test_a_file_of_a_former_job_does_not_end_one_that_is_starting() -> None:
    """The launcher has opened its ports, and its chief does not answer before it has joined the job."""
    end = JobEndDetector(LAUNCHED, IDLE_S, 0)
    assert over(end, (JobLiveness.UNRESPONSIVE, 1), (JobLiveness.UNRESPONSIVE, 2), has_marker=True) == [False, False]
    assert over(end, (JobLiveness.UNRESPONSIVE, 3)) == [False], "the chief has withdrawn it"
    assert over(end, (JobLiveness.UNRESPONSIVE, 4), has_marker=True) == [True]


def test_a_file_of_a_former_job_without_ports_does_not_end_one_that_is_starting() -> None:
    """No port says that its chief is about to begin, to withdraw the file and to save."""
    end = JobEndDetector(BY_HAND, IDLE_S, 0)
    end.record_checkpoint(1)  # the newest of the former job
    assert over(end, (JobLiveness.STOPPED, 2), (JobLiveness.STOPPED, 100.9), has_marker=True) == [False, False]
    assert over(end, (JobLiveness.STOPPED, 101), has_marker=True) == [True], "no other job has begun"
    end = JobEndDetector(BY_HAND, IDLE_S, 0)
    assert over(end, (JobLiveness.STOPPED, 2), has_marker=True) == [False]
    assert over(end, (JobLiveness.STOPPED, 3)) == [False], "the chief has withdrawn it"
    assert over(end, (JobLiveness.STOPPED, 4), has_marker=True) == [True]


def test_a_store_that_does_not_answer_has_not_withdrawn_the_file() -> None:
    end = JobEndDetector(LAUNCHED, IDLE_S, 0)
    assert over(end, (JobLiveness.UNRESPONSIVE, 1), has_marker=None) == [False]
    assert over(end, (JobLiveness.UNRESPONSIVE, 2), has_marker=True) == [False], "it may be of a former job"


# Ports.


@pytest.fixture
def chief() -> Iterator[tuple[ClusterSpec, Listener]]:
    sock = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    spec = ClusterSpec({"worker": [address, "127.0.0.1:1"]})
    me = TaskIdentity(spec, Task("worker", 0), JobFacts(), JobConfig(secret=SECRET))
    listener = Listener([sock], task="worker/0", credentials=Credentials(SECRET))
    listener.register(PROBE, ProbeService(me))
    with listener:
        yield spec, listener


def probe_of(spec: ClusterSpec, secret: bytes = SECRET) -> JobProbe:
    return JobProbe(spec, EVALUATOR, JobConfig(secret=secret), time.monotonic)


def test_a_chief_that_listens_is_alive_and_one_that_does_not_is_gone(chief: tuple[ClusterSpec, Listener]) -> None:
    spec, listener = chief
    assert probe_of(spec).probe() is JobLiveness.ALIVE
    listener.close()
    assert probe_of(spec).probe() is JobLiveness.STOPPED


def test_another_secret_is_remembered_for_the_message(chief: tuple[ClusterSpec, Listener]) -> None:
    probe = probe_of(chief[0], b"another secret of 16")
    assert probe.probe() is JobLiveness.STOPPED
    assert "secret" in probe.last_error


def test_a_port_where_nobody_answers_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        spec = ClusterSpec({"worker": [f"127.0.0.1:{sock.getsockname()[1]}"]})
        assert probe_of(spec).probe() is JobLiveness.UNRESPONSIVE


def test_without_a_cluster_nobody_is_asked() -> None:
    assert probe_of(ClusterSpec({})).probe() is JobLiveness.STOPPED


def test_servers_are_asked_before_the_chief() -> None:
    config = {"cluster": {"ps": ["a:1", "b:1"], "worker": ["c:1", "d:1"], "chief": ["e:1"]}}
    probe = probe_of(read_cluster(json.loads(json.dumps(config))))
    assert [str(task) for task in probe._tasks] == ["ps/0", "chief/0"]


def test_no_thread_is_left() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("phalanx-loop")]


def test_a_network_that_is_down_says_nothing_of_the_job() -> None:
    assert probe_of(ClusterSpec({"worker": ["no-such-host.invalid:1"]})).probe() is JobLiveness.UNRESPONSIVE
