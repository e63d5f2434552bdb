"""A worker's questions to several servers, real ones, in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
import pytest

from phalanx.cluster.peer_identification import PROBE
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.job_config import JobConfig
from phalanx.errors import LinkClosedError, LinkTimeoutError, PhalanxError
from phalanx.parameter_server.client.parameter_client import ParameterServerClient
from phalanx.parameter_server.server.group_leadership import LeaderOffer
from phalanx.parameter_server.server.parameter_server import ParameterServer
from phalanx.parameter_server.server.shard_group import ShardGroup
from phalanx.parameter_server.server_messages import (
    Broadcast,
    Decision,
    OpenEpoch,
    PullValues,
    PushGradients,
    QueryJobOver,
    RequestBroadcast,
    Ticket,
)
from phalanx.parameter_server.server_protocol import CHIEF_WORKER, LEADING, PROMOTE_PURPOSE
from phalanx.transport.dial import RefusedError
from phalanx.transport.handshake import Hello
from tests.launcher.conftest import wait_until

BOUND_S = 60.0
SERVERS = 2


Cluster = tuple[list[ParameterServer], list[ParameterServerClient]]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two servers and two workers."""
    with started() as servers_and_clients:
        yield servers_and_clients


@contextmanager
def started(*, copied: bool = False, timeout_s: float = BOUND_S) -> Iterator[Cluster]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(SERVERS)]
    addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    spec = ClusterSpec({"ps": addresses, "worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    config = JobConfig(secret=b"0123456789abcdef", rendezvous_timeout_s=BOUND_S, timeout_s=timeout_s)
    with ExitStack() as stack:
        servers = [
            ParameterServer(TaskIdentity(spec, Task("ps", index), JobFacts(), config), is_replicated=copied)
            for index in range(SERVERS)
        ]
        for server, sock in zip(servers, sockets, strict=True):
            thread = threading.Thread(target=server.run, args=([sock],))
            thread.start()
            stack.callback(thread.join, BOUND_S)
            stack.callback(server.stop)
        clients = [
            ParameterServerClient(
                TaskIdentity(spec, Task("worker", n), JobFacts(), config),
                return_timeout_s=BOUND_S,
                is_replicated=copied,
            )
            for n in range(2)
        ]
        for client in clients:
            stack.callback(client.close)
        yield servers, clients


@pytest.fixture
def client(cluster: Cluster) -> ParameterServerClient:
    return cluster[1][0]


def test_a_link_that_breaks_is_mended_while_another_servers_answer_is_waited_for(cluster: Cluster) -> None:
    """That answer may wait for a worker which waits at the other server for this one."""
    servers, (chief, other) = cluster
    waiting = threading.Thread(target=other.request, args=(0, RequestBroadcast("subject")))
    waiting.start()
    links = servers[1]._groups[0]._members.table.links
    wait_until(lambda: 1 in links)
    broken = links[1][1]
    broken.close()
    wait_until(lambda: links.get(1, (None, broken))[1] is not broken)
    assert waiting.is_alive()
    chief.request(0, Broadcast("subject"))
    waiting.join(BOUND_S)
    assert not waiting.is_alive()


def test_no_answer_is_left_unread_when_a_server_refuses(client: ParameterServerClient) -> None:
    with pytest.raises(PhalanxError, match="ps/0 failed"):  # nothing has been declared
        client.request_all([(OpenEpoch(0, 0, -1), ()), (PullValues(0, -1), ())])
    assert client.request(1, QueryJobOver())[0] == Decision(answer=False), "and not the answer to the question before"


@pytest.mark.parametrize("through_memory", [True, False])
def test_what_may_have_to_be_repeated_is_kept_until_it_is_answered(
    client: ParameterServerClient, through_memory: bool
) -> None:
    kinds = (((10_000,), np.dtype(np.float32)),)
    if through_memory:
        client.share_memory(0, kinds)
    (gradient,) = room = client.send_buffers(0, kinds)
    assert not gradient.any()
    assert gradient.ctypes.data % 64 == 0
    gradient[:] = 1.0
    client.send(0, PushGradients(Ticket(0, 0, 0, (0,), 0, 1, 0), 0, True, True, 1.0, ("float32",)), room)
    if through_memory:  # the link breaks: the next one shares other memory, or none
        client._connections[0].close_channel()
    kept = client._connections[0].pending
    assert kept is not None
    np.testing.assert_array_equal(kept[1][0], 1.0)
    with pytest.raises(PhalanxError):  # nothing has been declared
        client.receive(0)
    assert (client.send_buffers(0, kinds) is room) is not through_memory


def test_of_two_servers_that_lead_the_one_that_was_called_upon_later_is_right() -> None:
    """The other was stopped, and asks or is asked first when it wakes: the answer is the same."""
    with started(copied=True) as (servers, _):
        was_stopped, called = servers[0]._groups[0], servers[1]._groups[1]
        wait_until(lambda: called.leadership.leader_link is not None)
        me = was_stopped._me

        def asks(group: ShardGroup, term: int) -> str:
            newcomer = LeaderOffer(me.description, has_no_values=False, term=term)
            return group.leadership.admit(
                Hello(purpose="", task="", peer="", details=msgspec.msgpack.encode(newcomer))
            ).refusal

        called.leadership.become_leader()
        assert asks(called, term=0) == LEADING
        assert asks(was_stopped, term=1) == ""
        assert called.leadership.is_leading
        assert not was_stopped.leadership.is_leading
        wait_until(lambda: was_stopped.leadership.leader_link is not None)


@pytest.mark.parametrize("has_led", [False, True])
def test_a_server_that_takes_the_lead_late_in_a_job_does_not_miss_the_chief_at_once(has_led: bool) -> None:
    """The chief first promotes it, and connects then."""
    with started(copied=True) as (servers, _):
        copy = servers[1]._groups[1]
        wait_until(lambda: copy.leadership.leader_link is not None)
        long_ago = -3600.0
        copy._started += long_ago
        copy.leadership.followed_until += long_ago
        if has_led:
            copy._members.table._lost_since[CHIEF_WORKER] = copy._members.clock() + long_ago
        copy.leadership.become_leader()
        assert not copy.is_over()


def test_all_groups_of_a_server_that_hangs_get_another_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that owes this worker nothing: others may wait for its new leader, and this worker for them."""
    with started(copied=True, timeout_s=2.0) as (servers, clients):
        chief, hanging = clients[0], servers[1]
        grants = chief.reconnection.grants
        assert grants is not None
        wait_until(lambda: grants.has_replica(0))
        for client in clients:
            client.reconnection.reconnect(0, LinkClosedError("the first server is cut off for a moment"))
        assert all(group.leadership.is_leading for group in hanging._groups)
        wait_until(lambda: grants.has_replica(0) and grants.has_replica(1))
        goes_on = threading.Event()

        def pull(*arguments: object) -> tuple[int, list[np.ndarray]]:
            del arguments
            goes_on.wait(BOUND_S)
            return 0, []

        monkeypatch.setattr(hanging._groups[0]._store, "pull", pull)
        monkeypatch.setattr(chief.reconnection, "_is_alive", lambda server: server != hanging._me.task)
        try:
            chief.request(1, PullValues(0, -1))
        finally:
            goes_on.set()
        assert [chief.reconnection.leader_of(group) for group in range(SERVERS)] == [Task("ps", 0)] * SERVERS


def test_a_server_that_keeps_a_copy_applies_no_gradients() -> None:
    """Not those of a request either that it began to answer when it still led."""
    with started(copied=True) as (servers, _):
        copy = servers[1]._groups[1]
        wait_until(lambda: copy.leadership.leader_link is not None)
        ticket = Ticket(0, 0, 0, (0, 1), 0, serial=1, era=0)
        with pytest.raises(LinkClosedError, match="another server leads"):
            copy._store.push(PushGradients(ticket, 0, True, True, 0.5, ("float32",)), [memoryview(bytes(8))])


def test_a_server_that_restores_values_answers_other_tasks_meanwhile() -> None:
    with started(copied=True) as (servers, (chief, other)):
        group, me, head = servers[0]._groups[0], chief._me, Task("ps", 0)

        def promote() -> None:
            with pytest.raises(RefusedError):  # it brings no description of its task
                me.dial(head, f"{PROMOTE_PURPOSE}/0", deadline=time.monotonic() + BOUND_S)

        with group._store.changed, group.leadership._applying:  # as while all values of a large model arrive
            promoting = threading.Thread(target=promote)
            promoting.start()
            me.dial(head, PROBE, deadline=time.monotonic() + BOUND_S / 4)[0].close()
            other.reconnection._connect(0, time.monotonic() + BOUND_S / 4)
            assert promoting.is_alive()
        promoting.join(BOUND_S)


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one() -> None:
    with started(timeout_s=0.5) as (servers, (_, other)):
        other.is_starting = False
        store = servers[0]._groups[0]._store
        goes_on = threading.Event()

        def pull(*arguments: object) -> tuple[int, list[np.ndarray]]:
            del arguments
            goes_on.wait(BOUND_S)
            return 77, []

        store.pull = pull
        with pytest.raises(LinkTimeoutError):
            other.request(0, PullValues(0, -1))
        goes_on.set()
        assert not other.query_head(QueryJobOver())


def test_a_link_whose_end_only_the_worker_has_noticed_is_replaced(cluster: Cluster) -> None:
    servers, (_, other) = cluster
    group = servers[0]._groups[0]
    other.request(0, QueryJobOver())  # the server knows the link by its answer: it welcomes a worker before that
    _, former = group._members.table.links[1]
    abandoned = other._connections[0].link
    other._connections[0].link, _, _ = other.reconnection._connect(0, time.monotonic() + BOUND_S)
    assert not other.query_head(QueryJobOver())
    assert group._members.table.links[1][1] is not former
    abandoned.close()
