"""The rendezvous of real processes: killed, restarted, started twice, and on hosts of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from phalanx.cluster import ClusterSpec, Task
from tests.cluster.conftest import Ports, Processes, wait_until
from tests.support.network import Network

WORKERS = [Task("worker", index) for index in range(3)]


def test_processes_meet_and_their_links_work(ports: Ports, processes: Processes) -> None:
    spec = ports.workers(3)
    started = [processes.start(spec, task) for task in reversed(WORKERS)][::-1]
    events = [process.event() for process in started]
    for rank, event in enumerate(events):
        assert event["event"] == "joined", event
        assert event["rank"] == rank
        assert event["members"] == ["worker/0", "worker/1", "worker/2"]
        assert event["pids"] == [process.process.pid for process in started]
        assert event["local_ranks"] == [0, 1, 2]
    for process in started:
        process.write("exchange")
    assert started[0].event()["received"] == ["from 1", "from 2"]
    assert started[2].event()["received"] == ["from 0", "from 1"]
    assert [process.end() for process in started] == [0, 0, 0]


def test_a_killed_task_can_be_restarted_before_the_start(ports: Ports, processes: Processes) -> None:
    spec = ports.workers(3)
    first = processes.start(spec, WORKERS[1])
    wait_until(lambda: "worker/2" in first.log)
    chief = processes.start(spec, WORKERS[0])
    # It names the missing task, which is only worker/2: the other two are linked.
    wait_until(lambda: "worker/2" in chief.log)
    assert "worker/1 at" not in chief.log
    first.kill()
    second = processes.start(spec, WORKERS[1])
    # It waits for the third one; so it has met the chief, which is killed now.
    wait_until(lambda: "worker/2" in second.log)
    chief.kill()
    chief = processes.start(spec, WORKERS[0])
    last = processes.start(spec, WORKERS[2])
    for process in (chief, second, last):
        event = process.event()
        assert event["event"] == "joined", event
        assert event["pids"][1] == second.process.pid


def test_a_killed_member_is_seen_at_once_by_the_others(ports: Ports, processes: Processes) -> None:
    spec = ports.workers(2)
    chief, other = (processes.start(spec, task) for task in WORKERS[:2])
    assert chief.event()["event"] == other.event()["event"] == "joined"
    other.kill()
    assert "closed" in chief.tell("exchange")["received"][-1]
    assert chief.end() == 0


def test_a_worker_that_is_alone_says_who_is_missing_and_ends_with_the_code(ports: Ports, processes: Processes) -> None:
    process = processes.start(ports.workers(2), WORKERS[0], PHALANX_RENDEZVOUS_TIMEOUT="3")
    event = process.event()
    assert event["type"] == "RendezvousError"
    assert process.end() == 66
    assert process.log.count("worker/0 waits up to 3 s for:\n  worker/1 at 127.0.0.1:") == 1


def test_the_same_task_started_twice_ends_the_second_and_not_the_job(ports: Ports, processes: Processes) -> None:
    spec = ports.workers(2)
    chief, other = (processes.start(spec, task) for task in WORKERS[:2])
    assert chief.event()["event"] == other.event()["event"] == "joined"
    second = processes.start(spec, WORKERS[1])
    event = second.event()
    assert event["type"] == "ConfigurationError"
    assert f"worker/1 runs already: worker/1 (pid {other.process.pid} on" in event["message"]
    assert second.end() == 64
    for process in (chief, other):
        process.write("exchange")
    assert chief.event()["received"] == ["from 1"]


def test_tasks_that_differ_all_end_with_the_code(ports: Ports, processes: Processes) -> None:
    spec = ports.workers(3)
    started = [processes.start(spec, task, TEST_SEED="0") for task in WORKERS[:2]]
    wait_until(lambda: all("worker/2" in process.log for process in started))
    started.append(processes.start(spec, WORKERS[2], TEST_SEED="1"))
    for process in started:
        event = process.event()
        assert event["type"] == "DisagreementError"
        assert re.search(r"seed: 0 on worker/[01], 1 on worker/2", event["message"])
        assert process.end() == 67


# ------------------------------------------------------------------------ hosts of their own


@pytest.fixture
def network() -> Iterator[Network]:
    if problem := Network.problem():
        pytest.skip(problem)
    with Network(3) as network:
        yield network


def test_hosts_of_their_own_meet_and_a_second_process_elsewhere_is_refused(
    network: Network, processes: Processes
) -> None:
    spec = ClusterSpec({"worker": [f"{network.subnet}.1:2222", f"{network.subnet}.2:2222"]})
    started = [
        processes.start(spec, task, prefix=network.prefix(task.index + 1), PHALANX_HOST_ID=f"h{task.index}")
        for task in WORKERS[:2]
    ]
    for process in started:
        event = process.event()
        assert event["event"] == "joined", event
        assert len(event["local_ranks"]) == 1
    for task in WORKERS[:2]:
        second = processes.start(
            spec, task, prefix=network.prefix(3), PHALANX_HOST_ID="h3", PHALANX_RENDEZVOUS_TIMEOUT="20"
        )
        event = second.event()
        assert event["type"] in ("RendezvousError", "ConfigurationError")
        assert re.search("has begun, with worker/1|worker/0 runs already", event["message"])
    assert [process.end() for process in started] == [0, 0]


@pytest.mark.slow
def test_the_silent_death_of_a_host_is_noticed_though_bytes_are_in_flight(
    network: Network, processes: Processes
) -> None:
    spec = ClusterSpec({"worker": [f"{network.subnet}.1:2222", f"{network.subnet}.2:2222"]})
    chief, other = (processes.start(spec, task, prefix=network.prefix(task.index + 1)) for task in WORKERS[:2])
    assert chief.event()["event"] == other.event()["event"] == "joined"
    network.cut(2)
    # It sends, which is never acknowledged, and waits: keep-alive does not work then.
    assert "the host of worker/1 has not answered for" in chief.tell("exchange")["received"][-1]
