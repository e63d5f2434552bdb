"""With copies, a leader that the chief does not reach is silent, and the chief knows which copies lack updates."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from phalanx.cluster.spec import Task
from phalanx.errors import LinkClosedError, LinkTimeoutError
from phalanx.parameter_server.server import leader_lease, replication
from phalanx.parameter_server.server.group_leadership import GroupLeadership, GroupRole
from phalanx.parameter_server.server.leader_lease import LeaderLease
from phalanx.parameter_server.server.replication import REPLICA_TIMEOUT_S, ReplicaStream
from phalanx.parameter_server.server.service_threads import ServiceThreads
from phalanx.parameter_server.server_messages import GroupState, JobOver, LeaseRequest, QueryJobOver, Response
from phalanx.parameter_server.server_protocol import LEASE_DURATION_S
from phalanx.transport.frames import encode_frame
from tests.launcher.conftest import wait_until
from tests.parameter_server.test_client import BOUND_S, started
from tests.parameter_server.test_schedule import declared_model


def test_a_leader_that_the_chief_does_not_reach_is_silent_before_the_copy_leads(monkeypatch: Any) -> None:
    """{leader, worker} | {chief, copy}: the leader and its worker notice nothing of the cut."""
    with started(copied=True) as (servers, (chief, other)):
        leader, copy = servers[0]._groups[0], servers[1]._groups[1]
        wait_until(lambda: copy.leadership.leader_link is not None and leader.lease.is_valid)
        grants = chief.reconnection.grants
        assert grants is not None
        wait_until(lambda: grants.has_replica(0))
        both_lead: list[bool] = []
        lead = copy.leadership.become_leader

        def called() -> None:
            both_lead.append(leader.lease.is_valid)
            lead()

        monkeypatch.setattr(copy.leadership, "become_leader", called)
        grants.end(0)  # its links stay open, as in a partition
        wait_until(lambda: leader.lease.has_lapsed)
        assert leader.leadership.is_leading
        answers: list[Response] = []
        asking = threading.Thread(target=lambda: answers.append(other.request(0, QueryJobOver())[0]), daemon=True)
        monkeypatch.setattr(leader.leadership, "_become_follower", lambda: None)  # it does not learn of the new leader
        asking.start()
        grants.begin(0, servers[0]._me.task)
        wait_until(lambda: leader.lease.is_valid)
        asking.join(BOUND_S)
        assert len(answers) == 1, "answered as soon as the chief is there again"

        grants.wait_until_over(0)
        asking = threading.Thread(target=lambda: answers.append(other.request(0, QueryJobOver())[0]), daemon=True)
        asking.start()
        chief.reconnection.reconnect(0, LinkClosedError("the network is cut"))
        assert copy.leadership.is_leading
        assert both_lead == [False]
        assert leader.leadership.is_leading, "and still silent"
        assert len(answers) == 1
        monkeypatch.undo()  # the cut is mended
        asking.join(BOUND_S)
        assert len(answers) == 2, "by the new leader"
        assert not leader.leadership.is_leading


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Chief:
    """The chief's end of a lease link, without a network.

    Args:
        takes_s: seconds until each grant arrives; the link ends after them.
    """

    def __init__(self, clock: Clock, *takes_s: float):
        self._clock = clock
        self._takes_s = list(takes_s)
        self.requests: list[LeaseRequest] = []

    def send(self, header: bytes, *, deadline: float) -> None:
        self.requests.append(msgspec.msgpack.decode(header, type=LeaseRequest))

    def receive(self, *, deadline: float) -> None:
        if not self._takes_s:
            raise LinkClosedError("cut")
        self._clock.now += self._takes_s.pop(0)

    def close(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(leader_lease, "time", clock)
    monkeypatch.setattr(leader_lease, "RENEW_INTERVAL_S", 0.0)
    return clock


def lease_of(replica: Any) -> LeaderLease:
    return LeaderLease("worker/0", replica, threading.Condition(), ServiceThreads(), lambda: True)


def test_a_lease_is_counted_from_its_request(clock: Clock) -> None:
    lease = lease_of(SimpleNamespace(is_current=True, losses=0))
    assert not lease.is_valid
    assert not lease.has_lapsed
    lease._renew(Chief(clock, LEASE_DURATION_S - 0.5))  # type: ignore[arg-type]
    assert lease.is_valid
    clock.now += 0.5
    assert lease.has_lapsed
    lease._renew(Chief(clock, LEASE_DURATION_S + 0.1))  # type: ignore[arg-type]
    assert not lease.is_valid


def test_a_copy_counts_when_it_has_received_the_values() -> None:
    replica = ReplicaStream(0, threading.Condition())
    lease = lease_of(replica)
    covered: list[tuple[bool, bool]] = []

    def state() -> None:
        covered.append((replica.has_link, lease.covers_updates))

    assert replica.attach(SimpleNamespace(), state)  # type: ignore[arg-type]  # there is nothing to send
    assert covered == [(True, False)]
    assert lease.covers_updates


class SlowLink:
    """Takes 30 MB each second.

    Attributes:
        sent: the bytes of each call.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self.sent: list[bytes] = []
        self.is_stopped = False

    def send(self, header: bytes, buffers: Sequence[Any], *, deadline: float) -> None:
        self.send_bytes([memoryview(header), *map(memoryview, buffers)], deadline=deadline)

    def send_bytes(self, pieces: Sequence[memoryview], *, deadline: float) -> None:
        size = sum(piece.nbytes for piece in pieces)
        self._clock.now = deadline + 1 if self.is_stopped else self._clock.now + size / 30e6
        if self._clock.now > deadline:
            raise LinkTimeoutError("ps/1 did not read", "ps/1")
        if size < 1 << 20:
            self.sent.append(b"".join(pieces))

    def receive(self, *, deadline: float) -> tuple[bytes, list[memoryview]]:
        return b"", []

    def close(self) -> None:
        pass


def test_a_copy_may_receive_its_values_for_longer_than_an_update_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(replication, "time", clock)
    state = GroupState(declared_model(), 1, 1, (), (), ("uint8",), 0, False, 0), [np.zeros(1 << 30, np.uint8)]
    replica, link, began_at = ReplicaStream(0, threading.Condition()), SlowLink(clock), clock.now
    assert replica.attach(link, lambda: state)  # type: ignore[arg-type]
    assert clock.now - began_at > REPLICA_TIMEOUT_S
    link.is_stopped, stopped_at = True, clock.now
    replica.send_state(state)
    assert not replica.has_link
    assert clock.now - stopped_at < REPLICA_TIMEOUT_S + 2


@pytest.mark.parametrize("part", [1, 7, 64, 1000])
def test_a_record_in_parts_is_the_same_frame(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(replication, "PART_BYTES", part)
    link, values = SlowLink(Clock()), [np.arange(50, dtype=np.uint8), np.zeros(0, np.uint8), np.ones(64, np.uint8)]
    replica = ReplicaStream(0, threading.Condition())
    assert replica.attach(link, lambda: None)  # type: ignore[arg-type]
    replica.send(JobOver(), values)
    assert b"".join(link.sent) == b"".join(encode_frame(msgspec.msgpack.encode(JobOver()), values))
    assert max(map(len, link.sent)) <= part


class Interrupted(ReplicaStream):
    """Between two reads of its attributes, something else happens."""

    meanwhile: Callable[[], object] | None = None

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("_link", "_has_state") and (run := self.meanwhile) is not None:
            self.meanwhile = None
            run()
        return value


def test_a_copy_that_connects_while_another_thread_looks_does_not_count_yet() -> None:
    replica = Interrupted(0, threading.Condition())
    assert replica.attach(SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    replica._link = None  # it is lost

    def connect() -> None:
        def state() -> None:
            raise LinkClosedError("no value is sent yet")

        with contextlib.suppress(LinkClosedError):
            replica.attach(SimpleNamespace(), state)  # type: ignore[arg-type]

    replica.meanwhile = connect
    assert not replica.is_current
    assert replica.has_link
    assert not replica.is_current


def test_a_leader_that_steps_back_while_it_attaches_a_copy_stays_a_follower() -> None:
    threads = ServiceThreads()

    def attach(link: object, state: object) -> bool:
        leadership._become_follower()  # the chief promoted the other server, and that one reports it here
        threads.closing.set()
        return True

    me = SimpleNamespace(task="ps/0", description=None, dial=lambda *_, **__: (SimpleNamespace(), None))
    store = SimpleNamespace(fit=-1, state=None, replica=SimpleNamespace(is_attached=False, attach=attach))
    parts: Any = (store, SimpleNamespace(), SimpleNamespace())
    leadership = GroupLeadership(
        me,  # type: ignore[arg-type]
        0,
        parts,
        threading.Condition(),
        threads,
        is_own=True,
        other=Task("ps", 1),
        on_follow=lambda: (),
    )
    leadership.role = GroupRole.LEADING
    leadership._maintain_replica()
    assert leadership.role is GroupRole.FOLLOWING


def test_a_new_leader_admits_workers_only_when_it_has_taken_over() -> None:
    was_leading: list[bool] = []
    recovery = SimpleNamespace(become_leader=lambda: was_leading.append(leadership.is_leading))
    leadership = GroupLeadership(
        SimpleNamespace(task="ps/1"),  # type: ignore[arg-type]
        0,
        (SimpleNamespace(), SimpleNamespace(), recovery),  # type: ignore[arg-type]
        threading.Condition(),
        ServiceThreads(),
        is_own=False,
        other=Task("ps", 0),
        on_follow=lambda: (),
    )
    leadership.become_leader()
    assert was_leading == [False]
    assert leadership.is_leading


def test_an_update_without_a_copy_is_answered_when_the_chief_knows(clock: Clock) -> None:
    replica = SimpleNamespace(is_current=True, losses=0)
    lease, chief = lease_of(replica), Chief(clock, 0.1)
    lease._renew(chief)  # type: ignore[arg-type]
    assert lease.covers_updates
    replica.is_current, replica.losses = False, 1
    assert not lease.covers_updates
    lease._renew(chief)  # type: ignore[arg-type]  # the request arrives nowhere
    assert not lease.covers_updates
    again = Chief(clock, 0.1)
    lease._renew(again)  # type: ignore[arg-type]
    assert [request.is_replica_lost for request in again.requests] == [True, True]
    assert lease.covers_updates
    replica.losses = 2  # meanwhile there was another copy, of which the chief may know
    assert not lease.covers_updates
