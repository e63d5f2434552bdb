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
from phalanx.evaluator.end_of_job import JobEndDetector, JobLiveness, JobProbe
from phalanx.transport.credentials import Credentials
from phalanx.transport.listener import Listener

BY_HAND = JobConfig(rendezvous_timeout_s=100, timeout_s=50)
LAUNCHED = JobConfig(rendezvous_timeout_s=100, timeout_s=50, has_explicit_job_id=True)
IDLE_S = 1000
EVALUATOR = Task("evaluator", 0)
SECRET = b"0123456789abcdef"


def over(end: JobEndDetector, *signs: tuple[JobLiveness, float], announced: bool | None = False) -> list[bool]:
    return [end.is_over(sign, now, announced=announced) for sign, now in signs]


def test_a_job_that_lives_is_not_over_however_long_it_takes() -> None:
    assert over(JobEndDetector(BY_HAND, IDLE_S, 0), (JobLiveness.ALIVE, 1), (JobLiveness.ALIVE, 99_999)) == [
        False,
        False,
    ]


def test_a_job_that_was_seen_is_over_when_nobody_listens_for_a_while() -> None:
    signs = [(JobLiveness.ALIVE, 5), (JobLiveness.GONE, 6), (JobLiveness.GONE, 65.9), (JobLiveness.GONE, 66)]
    assert over(JobEndDetector(BY_HAND, IDLE_S, 0), *signs) == [False, False, False, True]


def test_somebody_who_comes_back_in_time_goes_on() -> None:
    signs = [(JobLiveness.ALIVE, 5), (JobLiveness.GONE, 14), (JobLiveness.ALIVE, 73), (JobLiveness.GONE, 132)]
    assert over(JobEndDetector(BY_HAND, IDLE_S, 0), *signs) == [False] * 4


def test_somebody_who_does_not_answer_is_waited_for_longer() -> None:
    signs = [(JobLiveness.ALIVE, 5), (JobLiveness.SILENT, 104), (JobLiveness.SILENT, 105)]
    assert over(JobEndDetector(BY_HAND, IDLE_S, 0), *signs) == [False, False, True]


def test_who_does_not_answer_but_saves_is_there() -> None:
    end = JobEndDetector(BY_HAND, IDLE_S, 0)
    assert over(end, (JobLiveness.SILENT, 99)) == [False]
    end.record_checkpoint(99)
    signs = [(JobLiveness.SILENT, 198), (JobLiveness.GONE, 199), (JobLiveness.GONE, 259)]
    assert over(end, *signs) == [False, False, True]


def test_a_job_that_never_came_is_over_after_the_time_to_start() -> None:
    end = JobEndDetector(BY_HAND, IDLE_S, 0)
    assert over(end, (JobLiveness.GONE, 99), (JobLiveness.GONE, 100)) == [False, True]
    assert end.saw_nothing


def test_a_job_of_the_launcher_that_ended_before_the_first_look_is_over() -> None:
    end = JobEndDetector(LAUNCHED, IDLE_S, 0)
    end.record_checkpoint(20)
    assert over(end, (JobLiveness.GONE, 21), (JobLiveness.GONE, 23), (JobLiveness.GONE, 24)) == [False, False, True]
    assert not end.saw_nothing


def test_a_job_without_ports_is_over_when_it_saves_no_more() -> None:
    end = JobEndDetector(BY_HAND, IDLE_S, 0)
    end.record_checkpoint(90)
    assert over(end, (JobLiveness.GONE, 1089), (JobLiveness.GONE, 1090)) == [False, True]
    assert not end.saw_nothing


def test_what_a_file_says_counts_only_where_nobody_answers() -> None:
    for sign, ends in ((JobLiveness.ALIVE, False), (JobLiveness.SILENT, True), (JobLiveness.GONE, True)):
        end = JobEndDetector(BY_HAND, IDLE_S, 0)
        assert over(end, (JobLiveness.ALIVE, 1)) == [False]
        assert over(end, (sign, 2), announced=True) == [ends]


def test_a_file_of_a_former_job_does_not_end_one_that_is_starting() -> None:
    """The launcher has opened its ports, and its chief does not answer before it has joined the job."""
    end = JobEndDetector(LAUNCHED, IDLE_S, 0)
    assert over(end, (JobLiveness.SILENT, 1), (JobLiveness.SILENT, 2), announced=True) == [False, False]
    assert over(end, (JobLiveness.SILENT, 3)) == [False], "the chief has withdrawn it"
    assert over(end, (JobLiveness.SILENT, 4), announced=True) == [True]


def test_a_file_of_a_former_job_without_ports_does_not_end_one_that_is_starting() -> None:
    """No port says that its chief is about to begin, to withdraw the file and to save."""
    end = JobEndDetector(BY_HAND, IDLE_S, 0)
    end.record_checkpoint(1)  # the newest of the former job
    assert over(end, (JobLiveness.GONE, 2), (JobLiveness.GONE, 100.9), announced=True) == [False, False]
    assert over(end, (JobLiveness.GONE, 101), announced=True) == [True], "no other job has begun"
    end = JobEndDetector(BY_HAND, IDLE_S, 0)
    assert over(end, (JobLiveness.GONE, 2), announced=True) == [False]
    assert over(end, (JobLiveness.GONE, 3)) == [False], "the chief has withdrawn it"
    assert over(end, (JobLiveness.GONE, 4), announced=True) == [True]


def test_a_store_that_does_not_answer_has_not_withdrawn_the_file() -> None:
    end = JobEndDetector(LAUNCHED, IDLE_S, 0)
    assert over(end, (JobLiveness.SILENT, 1), announced=None) == [False]
    assert over(end, (JobLiveness.SILENT, 2), announced=True) == [False], "it may be of a former job"


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
    assert probe_of(spec).probe() is JobLiveness.GONE


def test_another_secret_is_remembered_for_the_message(chief: tuple[ClusterSpec, Listener]) -> None:
    probe = probe_of(chief[0], b"another secret of 16")
    assert probe.probe() is JobLiveness.GONE
    assert "secret" in probe.trouble


def test_a_port_where_nobody_answers_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        spec = ClusterSpec({"worker": [f"127.0.0.1:{sock.getsockname()[1]}"]})
        assert probe_of(spec).probe() is JobLiveness.SILENT


def test_without_a_cluster_nobody_is_asked() -> None:
    assert probe_of(ClusterSpec({})).probe() is JobLiveness.GONE


def test_servers_are_asked_before_the_chief() -> None:
    config = {"cluster": {"ps": ["a:1", "b:1"], "worker": ["c:1", "d:1"], "chief": ["e:1"]}}
    probe = probe_of(read_cluster(json.loads(json.dumps(config))))
    assert [str(task) for task in probe._tasks] == ["ps/0", "chief/0"]


def test_no_thread_is_left() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("phalanx-loop")]


def test_a_network_that_is_down_says_nothing_of_the_job() -> None:
    assert probe_of(ClusterSpec({"worker": ["no-such-host.invalid:1"]})).probe() is JobLiveness.SILENT
