"""When an evaluator takes a job for ended: decided from signs and times, without a job."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.cluster.admission import PROBE, Probe
from phalanx.cluster.agreement import Facts
from phalanx.cluster.resolvers.tf_config import read_cluster
from phalanx.cluster.roll_call import Identity
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.settings import Settings
from phalanx.supervision.end_of_job import EndOfJob, Patience, Sign, Signs, patience
from phalanx.transport.listener import Listener

PATIENCE = Patience(start_s=100, gone_s=10, silent_s=50, idle_s=1000)
EVALUATOR = Task("evaluator", 0)
SECRET = b"0123456789abcdef"


def over(end: EndOfJob, *signs: tuple[Sign, float], announced: bool = False) -> list[bool]:
    return [end.is_over(sign, now, announced=announced) for sign, now in signs]


def test_a_job_that_lives_is_not_over_however_long_it_takes() -> None:
    assert over(EndOfJob(PATIENCE, 0), (Sign.ALIVE, 1), (Sign.ALIVE, 99_999)) == [False, False]


def test_a_job_that_was_seen_is_over_when_nobody_listens_for_a_while() -> None:
    signs = [(Sign.ALIVE, 5), (Sign.GONE, 6), (Sign.GONE, 15.9), (Sign.GONE, 16)]
    assert over(EndOfJob(PATIENCE, 0), *signs) == [False, False, False, True]


def test_somebody_who_comes_back_in_time_goes_on() -> None:
    signs = [(Sign.ALIVE, 5), (Sign.GONE, 14), (Sign.ALIVE, 15), (Sign.GONE, 24)]
    assert over(EndOfJob(PATIENCE, 0), *signs) == [False] * 4


def test_somebody_who_does_not_answer_is_waited_for_longer() -> None:
    signs = [(Sign.ALIVE, 5), (Sign.SILENT, 54), (Sign.SILENT, 55)]
    assert over(EndOfJob(PATIENCE, 0), *signs) == [False, False, True]


def test_who_does_not_answer_but_saves_is_there() -> None:
    end = EndOfJob(PATIENCE, 0)
    assert over(end, (Sign.SILENT, 49)) == [False]
    end.checkpoint(49)
    assert over(end, (Sign.SILENT, 98), (Sign.GONE, 99), (Sign.GONE, 109)) == [False, False, True]


def test_a_job_that_never_came_is_over_after_the_time_to_start() -> None:
    end = EndOfJob(PATIENCE, 0)
    assert over(end, (Sign.GONE, 99), (Sign.GONE, 100)) == [False, True]
    assert end.saw_nothing


def test_a_job_of_the_launcher_that_ended_before_the_first_look_is_over() -> None:
    end = EndOfJob(PATIENCE, 0, launched=True)
    end.checkpoint(20)
    assert over(end, (Sign.GONE, 21), (Sign.GONE, 30), (Sign.GONE, 31)) == [False, False, True]
    assert not end.saw_nothing


def test_a_job_without_ports_is_over_when_it_saves_no_more() -> None:
    end = EndOfJob(PATIENCE, 0)
    end.checkpoint(90)
    assert over(end, (Sign.GONE, 1089), (Sign.GONE, 1090)) == [False, True]
    assert not end.saw_nothing


def test_what_a_file_says_counts_only_where_nobody_answers() -> None:
    signs = [(Sign.ALIVE, 1), (Sign.SILENT, 2), (Sign.GONE, 3)]
    assert over(EndOfJob(PATIENCE, 0), *signs, announced=True) == [False, True, True]


def test_jobs_of_the_launcher_end_sooner() -> None:
    assert patience(Settings(named=True), 10).gone_s < patience(Settings(), 10).gone_s


# Ports.


@pytest.fixture
def chief() -> Iterator[tuple[ClusterSpec, Listener]]:
    sock = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    spec = ClusterSpec({"worker": [address, "127.0.0.1:1"]})
    me = Identity(spec, Task("worker", 0), Facts(), Settings(secret=SECRET))
    listener = Listener([sock], task="worker/0", secret=SECRET, job="", tls=None)
    listener.register(PROBE, Probe(me))
    with listener:
        yield spec, listener


def look(spec: ClusterSpec, secret: bytes = SECRET) -> Signs:
    return Signs(spec, EVALUATOR, Settings(secret=secret), time.monotonic)


def test_a_chief_that_listens_is_alive_and_one_that_does_not_is_gone(chief: tuple[ClusterSpec, Listener]) -> None:
    spec, listener = chief
    assert look(spec).look() is Sign.ALIVE
    listener.close()
    assert look(spec).look() is Sign.GONE


def test_another_secret_is_remembered_for_the_message(chief: tuple[ClusterSpec, Listener]) -> None:
    signs = look(chief[0], b"another secret of 16")
    assert signs.look() is Sign.GONE
    assert "secret" in signs.trouble


def test_a_port_where_nobody_answers_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        spec = ClusterSpec({"worker": [f"127.0.0.1:{sock.getsockname()[1]}"]})
        assert look(spec).look() is Sign.SILENT


def test_without_a_cluster_nobody_is_asked() -> None:
    assert look(ClusterSpec({})).look() is Sign.GONE


def test_servers_are_asked_before_the_chief() -> None:
    config = {"cluster": {"ps": ["a:1", "b:1"], "worker": ["c:1", "d:1"], "chief": ["e:1"]}}
    signs = look(read_cluster(json.loads(json.dumps(config))))
    assert [str(task) for task in signs._tasks] == ["ps/0", "chief/0"]


def test_no_thread_is_left() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("phalanx-loop")]


def test_a_network_that_is_down_says_nothing_of_the_job() -> None:
    assert look(ClusterSpec({"worker": ["no-such-host.invalid:1"]})).look() is Sign.SILENT
