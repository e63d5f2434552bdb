"""The rendezvous: tasks in any order become ranks; whatever prevents it is an error that says so."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import os
import re
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from phalanx.cluster import (
    ClusterSpec,
    JobFacts,
    Node,
    Task,
    TFConfigClusterResolver,
    join,
    missing_tasks,
    rendezvous,
    task_identity,
)
from phalanx.cluster.admission_control import DUPLICATE, LEAVING, RUNNING
from phalanx.cluster.chief_rendezvous import ChiefRendezvous
from phalanx.cluster.membership_messages import MESH, RENDEZVOUS
from phalanx.cluster.rendezvous import permanent_error
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.job_config import JobConfig
from phalanx.errors import (
    ConfigurationError,
    DisagreementError,
    HandshakeError,
    LinkClosedError,
    RendezvousError,
    UnsupportedError,
)
from phalanx.runtime.host_identity import host_identity
from phalanx.transport.address import Address
from phalanx.transport.dial import RefusedError
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.ports import listen
from tests.cluster.conftest import SECRET, Meeting, Ports, exchange, wait_until
from tests.transport.conftest import make_certificates

BOUND_S = 30.0


def workers(spec: ClusterSpec) -> list[Task]:
    return list(spec.ranked_tasks)


# ----------------------------------------------------------------------------- it succeeds


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]], ids=str)
def test_tasks_that_start_in_any_order_become_ranks_with_links_between_all(
    order: list[int], ports: Ports, meeting: Meeting
) -> None:
    spec = ports.workers(3)
    for index in order:
        meeting.start(spec, Task("worker", index))
    nodes = meeting.nodes()
    for node in nodes:
        assert node.membership.rank == node.task.index
        assert [member.task for member in node.membership.members] == ["worker/0", "worker/1", "worker/2"]
        assert node.membership.members == nodes[0].membership.members
        assert node.membership.local_member.address == spec.task_address("worker", node.task.index)
        assert sorted(node.membership.links) == [rank for rank in range(3) if rank != node.membership.rank]
        for rank, link in node.membership.links.items():
            assert link.peer == f"worker/{rank}"
    exchange(nodes)


def test_the_chief_is_rank_0_and_others_do_not_count(ports: Ports, meeting: Meeting) -> None:
    spec = ClusterSpec(
        {"ps": [ports.new()], "worker": [ports.new()], "chief": [ports.new()], "evaluator": [ports.new()]}
    )
    meeting.start(spec, Task("worker", 0))
    meeting.start(spec, Task("chief", 0))
    by_rank = sorted(meeting.nodes(), key=lambda node: node.membership.rank)
    assert [str(node.task) for node in by_rank] == ["chief/0", "worker/0"]
    assert by_rank[0].membership.world_size == 2


def test_hosts_can_be_pretended(ports: Ports, meeting: Meeting) -> None:
    spec = ports.workers(3)
    for index, host in enumerate(["a", "b", "a"]):
        meeting.start(spec, Task("worker", index), host_id=host)
    by_rank = sorted(meeting.nodes(), key=lambda node: node.membership.rank)
    assert [node.membership.local_ranks for node in by_rank] == [(0, 2), (1,), (0, 2)]
    assert by_rank[2].membership.local_rank == 1
    assert host_identity() == host_identity(None) != host_identity("a") == "a"


def test_ipv6_addresses_work(ports: Ports, meeting: Meeting) -> None:
    try:
        spec = ports.workers(2, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    for task in workers(spec):
        meeting.start(spec, task)
    exchange(meeting.nodes())


def test_tls_works(ports: Ports, meeting: Meeting, tmp_path_factory: pytest.TempPathFactory) -> None:
    tls = make_certificates(tmp_path_factory.mktemp("certificates"))["ours"]
    spec = ports.workers(3)
    for task in workers(spec):
        meeting.start(spec, task, tls=tls)
    exchange(meeting.nodes())


def test_strangers_do_not_disturb_it(ports: Ports, meeting: Meeting) -> None:
    spec = ports.workers(2)
    meeting.start(spec, Task("worker", 0))
    address = spec.address(Task("worker", 0))
    garbage = [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", bytes(range(256)), b"", b"PHALANX\x01"]
    idle = []
    for data in garbage:
        wait_until(lambda: can_connect(idle, address.host, address.port))
        with contextlib.suppress(ConnectionError):
            idle[-1].sendall(data)
    meeting.start(spec, Task("worker", 1))
    exchange(meeting.nodes())
    for sock in idle:
        sock.close()


def can_connect(connected: list[socket.socket], host: str, port: int) -> bool:
    try:
        connected.append(socket.create_connection((host, port), timeout=5))
    except OSError:
        return False
    return True


def record_added_links(monkeypatch: pytest.MonkeyPatch) -> list[Link]:
    """The links of other tasks to the chief."""
    added: list[Link] = []
    original = ChiefRendezvous.adopt

    def adopt(chief: ChiefRendezvous, hello: Hello, link: Link) -> None:
        added.append(link)
        original(chief, hello, link)

    monkeypatch.setattr(ChiefRendezvous, "adopt", adopt)
    return added


def test_a_link_that_breaks_before_the_start_is_made_again(
    ports: Ports, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = record_added_links(monkeypatch)
    spec = ports.workers(3)
    meeting.start(spec, Task("worker", 0))
    meeting.start(spec, Task("worker", 1))
    wait_until(lambda: len(added) == 1)
    with contextlib.suppress(OSError):
        added[0]._sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: len(added) == 2)
    meeting.start(spec, Task("worker", 2))
    exchange(meeting.nodes())


# ---------------------------------------------------------------------------- worlds of one


def test_a_task_that_redials_just_when_the_job_begins_does_not_wait_for_an_order(
    ports: Ports, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was admitted before, and is adopted after. Its link is closed: it dials again, and is refused."""
    adopted, adopt = [], ChiefRendezvous.adopt

    def record(self: ChiefRendezvous, hello: Hello, link: Link) -> None:
        adopted.append((self, hello))
        adopt(self, hello, link)

    monkeypatch.setattr(ChiefRendezvous, "adopt", record)
    spec = ports.workers(2)
    for task in workers(spec):
        meeting.start(spec, task)
    nodes = meeting.nodes()
    (chief, hello), closed = adopted[-1], threading.Event()
    link: Any = SimpleNamespace(close=closed.set, receive=lambda **_: closed.wait(BOUND_S))
    chief.adopt(hello, link)
    assert closed.is_set()
    exchange(nodes)


def test_a_single_worker_needs_no_port(ports: Ports) -> None:
    spec = ports.workers(1)
    with join(spec, Task("worker", 0), config=JobConfig()) as node:
        assert (node.membership.rank, node.membership.world_size, node.listener) == (0, 1, None)
        assert node.membership.local_member.task == "worker/0"


@pytest.mark.parametrize("inside", [True, False])
def test_an_evaluator_waits_for_nobody(inside: bool, ports: Ports) -> None:
    cluster = {"worker": [ports.new(), ports.new()]} | ({"evaluator": [ports.new()]} if inside else {})
    with join(ClusterSpec(cluster), Task("evaluator", 0), config=JobConfig()) as node:
        assert (node.membership.world_size, node.membership.local_member.task) == (1, "evaluator/0")


def test_a_parameter_server_is_told_what_it_needs(ports: Ports) -> None:
    spec = ClusterSpec({"worker": [ports.new()], "ps": [ports.new()]})
    with pytest.raises(UnsupportedError, match="ParameterServerStrategy"):
        join(spec, Task("ps", 0), config=JobConfig())


def test_a_cluster_without_a_task_is_refused(ports: Ports) -> None:
    with pytest.raises(ConfigurationError, match="does not know which of them"):
        join(ports.workers(2), config=JobConfig())


def test_the_environment_is_what_join_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_HOST_ID", "pretended")
    with join(TFConfigClusterResolver(environ={})) as node:
        assert node.membership.local_member.host == "pretended"


# -------------------------------------------------------------------------------- it fails


def test_a_worker_that_is_alone_never_goes_on_and_names_the_missing(ports: Ports, meeting: Meeting) -> None:
    spec = ports.workers(3)
    meeting.start(spec, Task("worker", 1), timeout_s=0.3)
    error = meeting.wait()["worker/1"]
    assert isinstance(error, RendezvousError)
    text = str(error)
    assert "worker/1 (rank 1, at 127.0.0.1:" in text
    assert "has waited 0.3 s for the 2 other tasks" in text
    for index in (0, 2):
        assert f"worker/{index} at {spec.task_address('worker', index)}: nothing listens" in text
    assert "PHALANX_RENDEZVOUS_TIMEOUT" in text


def test_who_is_missing_is_said_once_while_waiting(
    ports: Ports, meeting: Meeting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_tasks, "NOTICE_AFTER_S", 0.1)
    spec = ports.workers(3)
    meeting.start(spec, Task("worker", 0))
    wait_until(lambda: "waits" in caplog.text)
    (notice,) = [record for record in caplog.records if "waits" in record.getMessage()]
    assert notice.levelno == logging.WARNING
    pattern = r"worker/0 waits up to 60 s for:\n  worker/1 at .*\n  worker/2 at "
    assert re.search(pattern, notice.getMessage())
    monkeypatch.setattr(missing_tasks, "NOTICE_AFTER_S", 60)
    meeting.start(spec, Task("worker", 1))
    meeting.start(spec, Task("worker", 2))
    meeting.nodes()
    assert caplog.text.count("waits") == 1


def test_a_task_that_runs_but_cannot_reach_this_one_is_told_apart(
    ports: Ports, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, "worker/1", "worker/0", RENDEZVOUS)
    spec = ports.workers(2)
    meeting.start(spec, Task("worker", 1), timeout_s=3)
    meeting.start(spec, Task("worker", 0), timeout_s=1)
    text = str(meeting.wait()["worker/0"])
    assert "runs, but has not reached worker/0" in text
    assert "worker/0 at" in str(meeting.results["worker/1"])


def test_two_tasks_that_cannot_reach_each_other_are_named_by_the_chief(
    ports: Ports, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, "worker/2", "worker/1", MESH)
    spec = ports.workers(3)
    for task in workers(spec):
        meeting.start(spec, task, timeout_s=1.5 if task.index == 0 else 3)
    text = str(meeting.wait()["worker/0"])
    assert re.search(r"worker/2 \(pid \d+ on .*\): worker/1 cannot be reached: a firewall", text)


def test_tasks_that_reach_each_other_at_the_second_attempt_begin(
    ports: Ports, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, "worker/2", "worker/1", MESH, times=1)
    for task in workers(spec := ports.workers(3)):
        meeting.start(spec, task)
    nodes = meeting.nodes()
    assert {node.membership.generation for node in nodes} == {2}
    exchange(nodes)


def block(monkeypatch: pytest.MonkeyPatch, source: str, target: str, purpose: str, *, times: float = math.inf) -> None:
    original = TaskIdentity.dial_address
    blocked = itertools.count()

    def dial(me: TaskIdentity, address: Address, peer: str, what: str, *args: bytes, **options: object) -> Any:
        if (str(me.task), peer, what) == (source, target, purpose) and next(blocked) < times:
            raise LinkClosedError("a firewall")
        return original(me, address, peer, what, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(TaskIdentity, "dial_address", dial)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_disagreement_ends_all_tasks_with_the_same_message(odd: int, ports: Ports, meeting: Meeting) -> None:
    spec = ports.workers(3)
    for task in workers(spec):
        meeting.start(spec, task, facts=JobFacts(seed=2 if task.index == odd else 1))
    results = meeting.wait()
    for error in results.values():
        assert isinstance(error, DisagreementError)
        assert re.search(r"seed: (1|2) on worker/\d, (1|2) on worker/\d", str(error))
        assert f"worker/{odd}" in str(error)


def test_tasks_that_disagree_about_the_cluster_say_so(ports: Ports, meeting: Meeting) -> None:
    addresses = [ports.new() for _ in range(3)]
    meeting.start(ClusterSpec({"worker": addresses[:2]}), Task("worker", 0))
    meeting.start(ClusterSpec({"worker": addresses}), Task("worker", 1))
    for error in meeting.wait().values():
        assert isinstance(error, DisagreementError)
        assert (
            f"worker/2 is at no address (it is not in the cluster) according to worker/0, and at "
            f"{addresses[2]}" in str(error)
        )


def test_a_task_that_looks_for_the_chief_elsewhere_is_found_to_disagree(
    ports: Ports, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_tasks, "NOTICE_AFTER_S", 0.1)
    addresses = [ports.new() for _ in range(3)]
    meeting.start(ClusterSpec({"worker": [addresses[2], addresses[1]]}), Task("worker", 1), timeout_s=3)
    wait_until(lambda: can_connect([], *addresses[1].split(":")))
    meeting.start(ClusterSpec({"worker": addresses[:2]}), Task("worker", 0))
    error = meeting.wait()["worker/0"]
    assert isinstance(error, DisagreementError)
    assert f"cluster: worker/0 is at {addresses[0]} according to worker/0, and at {addresses[2]}" in str(error)


def test_a_task_that_has_not_found_the_odd_one_hears_of_the_disagreement(ports: Ports, meeting: Meeting) -> None:
    """The first two wait already when a third one disagrees with the first it meets."""
    spec = ports.workers(3)
    meeting.start(spec, Task("worker", 0))
    meeting.start(spec, Task("worker", 1))
    time.sleep(0.2)  # Most likely they are linked by now; the outcome is the same if they are not.
    meeting.start(spec, Task("worker", 2), facts=JobFacts(seed=2))
    messages = {str(error) for error in meeting.wait().values()}
    assert all(isinstance(error, DisagreementError) for error in meeting.results.values())
    assert all("worker/2" in message for message in messages)


def test_an_evaluator_in_only_one_cluster_is_no_disagreement(ports: Ports, meeting: Meeting) -> None:
    addresses = [ports.new(), ports.new()]
    meeting.start(ClusterSpec({"worker": addresses, "evaluator": [ports.new()]}), Task("worker", 0))
    meeting.start(ClusterSpec({"worker": addresses}), Task("worker", 1))
    meeting.nodes()


def test_another_secret_ends_the_newcomer_and_is_named_by_the_one_that_waits(
    ports: Ports, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_FAILURES_S", 0.3)
    spec = ports.workers(2)
    meeting.start(spec, Task("worker", 0), timeout_s=3)
    meeting.start(spec, Task("worker", 1), secret=b"another secret of tests")
    results = meeting.wait()
    assert isinstance(results["worker/1"], HandshakeError)
    assert "PHALANX_SECRET differs" in str(results["worker/1"])
    assert isinstance(results["worker/0"], RendezvousError)
    assert "Refused connections: 127.0.0.1" in str(results["worker/0"])
    assert "wrong secret" in str(results["worker/0"])


def test_a_task_of_another_job_is_not_waited_for(ports: Ports, meeting: Meeting) -> None:
    spec = ports.workers(2)
    meeting.start(spec, Task("worker", 0), timeout_s=3, job_id="one")
    meeting.start(spec, Task("worker", 1), timeout_s=1, job_id="other")
    results = meeting.wait()
    assert all(isinstance(error, RendezvousError) for error in results.values())
    assert "of job 'one', not of job 'other'" in str(results["worker/1"])


# ------------------------------------------------------------------- the same task twice


def test_a_second_process_on_the_same_host_gets_the_error_and_the_job_goes_on(ports: Ports, meeting: Meeting) -> None:
    spec = ports.workers(2)
    for task in workers(spec):
        meeting.start(spec, task)
    nodes = meeting.nodes()
    with pytest.raises(ConfigurationError, match=r"worker/1 runs already: worker/1 \(pid \d+ on .*same task"):
        join(spec, Task("worker", 1), facts=JobFacts(seed=1), config=JobConfig(secret=SECRET))
    with pytest.raises(ConfigurationError, match="worker/0 runs already"):
        join(spec, Task("worker", 0), facts=JobFacts(seed=1), config=JobConfig(secret=SECRET))
    exchange(nodes)


def test_a_second_process_elsewhere_is_refused_by_the_chief_and_the_job_goes_on(
    ports: Ports, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host it can open the port; here it gets another one, unknown to the rest."""
    original = task_identity.open_listening_sockets

    def open_listening_sockets(*args: object, **options: object) -> list[socket.socket]:
        if threading.current_thread().name == "test-second":
            return [listen(socket.AF_INET, ("127.0.0.1", 0))]
        return original(*args, **options)  # type: ignore[arg-type]  # type: ignore[arg-type]

    monkeypatch.setattr(task_identity, "open_listening_sockets", open_listening_sockets)
    added = record_added_links(monkeypatch)
    spec = ports.workers(3)
    meeting.start(spec, Task("worker", 0))
    meeting.start(spec, Task("worker", 1))
    wait_until(lambda: len(added) == 1)
    meeting.start(spec, Task("worker", 1), name="second")
    wait_until(lambda: "second" in meeting.results)
    assert isinstance(meeting.results["second"], ConfigurationError)
    assert "worker/1 has joined already: worker/1 (pid" in str(meeting.results["second"])
    meeting.start(spec, Task("worker", 2))
    meeting.wait()
    del meeting.results["second"]
    exchange(meeting.nodes())


def test_a_second_chief_elsewhere_finds_the_first_at_its_address(
    ports: Ports, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_tasks, "NOTICE_AFTER_S", 0.2)
    original = task_identity.open_listening_sockets

    def open_listening_sockets(*args: object, **options: object) -> list[socket.socket]:
        if threading.current_thread().name == "test-second":
            return [listen(socket.AF_INET, ("127.0.0.1", 0))]
        return original(*args, **options)  # type: ignore[arg-type]  # type: ignore[arg-type]

    monkeypatch.setattr(task_identity, "open_listening_sockets", open_listening_sockets)
    spec = ports.workers(2)
    meeting.start(spec, Task("worker", 0))
    wait_until(lambda: can_connect([], *endpoint(spec, 0)))
    meeting.start(spec, Task("worker", 0), name="second")
    wait_until(lambda: "second" in meeting.results)
    assert "worker/0 runs already" in str(meeting.results["second"])
    del meeting.results["second"]
    meeting.start(spec, Task("worker", 1))
    exchange([node for node in meeting.wait().values() if isinstance(node, Node)])


def endpoint(spec: ClusterSpec, index: int) -> tuple[str, int]:
    address = spec.address(Task("worker", index))
    return address.host, address.port


def test_who_comes_when_the_job_has_begun_is_told_so(ports: Ports, meeting: Meeting) -> None:
    spec = ports.workers(2)
    for task in workers(spec):
        meeting.start(spec, task)
    nodes = sorted(meeting.nodes(), key=lambda node: node.membership.rank)
    newcomer = TaskIdentity(spec, Task("worker", 1), JobFacts(seed=1), JobConfig(secret=SECRET))

    def dial(pid: int = 1) -> Welcome:
        description = msgspec.structs.replace(newcomer.description, pid=pid)
        with pytest.raises(RefusedError) as caught:
            newcomer.dial(
                Task("worker", 0), RENDEZVOUS, msgspec.msgpack.encode(description), deadline=time.monotonic() + 10
            )
        return caught.value.welcome

    assert dial().refusal == RUNNING
    assert "the job has begun, with worker/1 (pid" in dial().reason
    exchange(nodes)
    nodes[1].close()
    wait_until(lambda: "lost worker/1" in dial().reason)
    # The same process, which has left, is early for the next job.
    assert dial(os.getpid()).refusal == LEAVING


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        ("disagreement", DisagreementError),
        (RUNNING, RendezvousError),
        (DUPLICATE, ConfigurationError),
        ("unavailable", type(None)),
        ("other job", type(None)),
    ],
)
def test_only_refusals_that_will_not_pass_are_final(refusal: str, kind: type) -> None:
    error = RefusedError("refused", Welcome(refusal=refusal, reason="because"))
    assert type(permanent_error(error, failing_s=1000)) is kind


def test_a_taken_port_is_named(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PORT_TAKEN_PATIENCE_S", 0.1)
    monkeypatch.setattr(missing_tasks, "PROBE_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        spec = ClusterSpec({"worker": [taken, ports.new()]})
        with pytest.raises(ConfigurationError, match=r"worker/0 cannot start: port .* taken by another process"):
            join(spec, Task("worker", 0), config=JobConfig(secret=SECRET))


def test_nothing_is_left_after_a_failure(ports: Ports, meeting: Meeting) -> None:
    spec = ports.workers(2)
    meeting.start(spec, Task("worker", 1), timeout_s=0.2)
    assert isinstance(meeting.wait()["worker/1"], RendezvousError)
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("phalanx-")])
    assert not can_connect([], *endpoint(spec, 1))


def test_closing_a_node_twice_is_safe_and_ends_its_threads(ports: Ports, meeting: Meeting) -> None:
    spec = ports.workers(2)
    for task in workers(spec):
        meeting.start(spec, task)
    for node in meeting.nodes():
        node.close()
        node.close()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("phalanx-")])


def test_jobs_started_and_stopped_in_a_loop_leak_nothing(ports: Ports) -> None:
    spec = ports.workers(2)
    descriptors = []
    for _ in range(15):
        with Meeting() as meeting:
            for task in workers(spec):
                meeting.start(spec, task)
            exchange(meeting.nodes())
        wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("phalanx-")])
        gc.collect()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[-1] <= descriptors[0]
