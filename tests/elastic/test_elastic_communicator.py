"""Collectives over losses: processes that are really killed, with a coordinator in the test's own process."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from phalanx.cluster import membership_messages
from phalanx.cluster.membership import Member, Membership
from phalanx.cluster.membership_messages import COORDINATOR, LAUNCHER, EntryAlreadyFinished, EntryFinished, EntryStarted
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.collectives.options import CommunicationImplementation, CommunicationOptions
from phalanx.config.job_config import CollectiveConfig, JobConfig, TLSFiles
from phalanx.elastic import coordinator_server
from phalanx.elastic.coordinator_client import CoordinatorClient
from phalanx.elastic.coordinator_server import CoordinatorServer
from phalanx.elastic.elastic_communicator import ElasticCommunicator
from phalanx.elastic.elastic_group import ElasticGroup
from phalanx.elastic.elastic_node import ElasticNode
from phalanx.elastic.member_table import MembershipLimits
from phalanx.errors import HandshakeError, LinkClosedError, MembershipChangedError
from phalanx.transport.address import Address
from phalanx.transport.credentials import Credentials
from phalanx.transport.decoding import Decoder
from phalanx.transport.dial import dial
from phalanx.transport.handshake import Handshake, Hello, Role
from phalanx.transport.link import Link
from phalanx.transport.serialization import decode, encode
from phalanx.transport.tls import load_tls
from tests.cluster.conftest import wait_until
from tests.transport.conftest import make_certificates

BOUND_S = 60.0
SECRET = b"0123456789abcdef"
Body = Callable[[ElasticCommunicator, int], Any]


class Members:
    """Forked processes, each with a communicator in which it runs a body."""

    def __init__(
        self,
        count: int,
        implementation: str = "AUTO",
        timeout_s: float = 30.0,
        simulated_mbits: float | None = None,
        tls: TLSFiles | None = None,
    ):
        self._simulated_mbits, self._tls = simulated_mbits, tls
        self.count = count
        self.notes: list[str] = []
        self.evicted: list[str] = []
        self._options = CommunicationOptions(
            implementation=CommunicationImplementation[implementation], timeout_seconds=timeout_s
        )
        self._port = socket.create_server(("127.0.0.1", 0))
        self.coordinator_address = f"127.0.0.1:{self._port.getsockname()[1]}"
        self._sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in self._sockets]
        self._spec = ClusterSpec({"worker": addresses})
        self._timeout_s = timeout_s
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, body: Body) -> None:
        """Start them, and then the coordinator: a fork with its threads would not be sound."""
        context = multiprocessing.get_context("fork")
        for number in range(self.count):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=self._child, args=(number, body, writer), daemon=True)
            process.start()
            writer.close()
            self.processes.append(process)
            self._pipes.append(reader)
        limits = MembershipLimits(1, self.count, self.count, start_s=BOUND_S, timeout_s=self._timeout_s)
        self.server = CoordinatorServer(
            [self._port],
            limits,
            credentials=Credentials(SECRET, load_tls(self._tls)),
            job="job",
            job_actions=self,
        )

    def results(self) -> list[Any]:
        """What each returned; None for those that were killed."""
        until = time.monotonic() + BOUND_S
        found = []
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            try:
                assert pipe.poll(max(0.0, until - time.monotonic())), f"no result within {BOUND_S} s; {self.notes}"
                found.append(pipe.recv())
            except EOFError:
                found.append(None)
            process.join(5)
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        ours = [Path(f"/proc/self/task/{t.native_id}") for t in threading.enumerate() if t.name.startswith("phalanx-")]
        self.server.close()
        for sock in self._sockets:
            sock.close()
        # A thread that has been joined may still be in OpenSSL, which takes a lock as a thread ends. Who is forked at
        # that moment inherits the lock, and hangs in its first handshake.
        wait_until(lambda: not any(path.exists() for path in ours))

    # See `LauncherActions`.

    def evict(self, task: str) -> None:
        self.evicted.append(task)
        self.processes[int(task.partition("/")[2])].kill()

    def release(self, task: str) -> None: ...

    def finish(self, tasks: Sequence[str]) -> None: ...

    def fail(self, reason: str, code: int) -> None: ...

    def resize(self, workers: int) -> None: ...

    def generation_formed(self, generation: int, tasks: Sequence[str]) -> None: ...

    def training_changed(self, *, is_training: bool) -> None: ...

    def log(self, text: str) -> None:
        self.notes.append(text)

    def _child(self, number: int, body: Body, pipe: Connection) -> None:
        config = JobConfig(
            secret=SECRET,
            job_id="job",
            elastic_coordinator=self.coordinator_address,
            listen_fd=self._sockets[number].fileno(),
            collectives=CollectiveConfig(simulated_mbits=self._simulated_mbits),
            tls=self._tls,
        )
        with ElasticNode(self._spec, Task("worker", number), JobFacts(), config) as node:
            group = ElasticGroup(node, self._options)
            communicator = ElasticCommunicator(group)
            assert group.join(0) is None
            pipe.send(body(communicator, number))
            communicator.close()


@pytest.fixture
def members() -> Iterator[Callable[..., Members]]:
    made: list[Members] = []

    def make(*args: Any, **kwargs: Any) -> Members:
        made.append(Members(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def repeatedly(communicator: ElasticCommunicator, value: float, size: int = 1000) -> tuple[float, int]:
    """The sum over all members of a value, however many there are in the end; and how often it was tried."""
    tries = 0
    while True:
        tries += 1
        try:
            (total,) = communicator.all_reduce([np.full(size, value, np.float32)])
            assert (total == total[0]).all()
            return float(total[0]), tries
        except MembershipChangedError:
            continue


def test_with_certificates_all_that_the_coordinator_says_and_hears_is_encrypted(members, tmp_path):
    files = make_certificates(tmp_path)["ours"]

    def body(communicator: ElasticCommunicator, number: int) -> Any:
        if number == 0:
            die()
        return repeatedly(communicator, 2.0**number)

    job = members(3, "RING", tls=files)
    job.run(body)
    assert [result and result[0] for result in job.results()] == [None, 6.0, 6.0]
    with pytest.raises(LinkClosedError):
        dial(
            Address.parse(job.coordinator_address, where="a test"),
            Hello(purpose=COORDINATOR, task="worker/9", peer=LAUNCHER, job="job"),
            credentials=Credentials(SECRET),
            deadline=time.monotonic() + BOUND_S,
        )


@pytest.mark.parametrize("mbits", [None, 1000.0])
def test_a_simulated_network_is_simulated_in_each_generation(members, mbits):
    def body(communicator: ElasticCommunicator, number: int) -> Any:
        kinds = [communicator.kind]
        if number == 2:
            die()
        repeatedly(communicator, 1.0)
        return [*kinds, communicator.kind]

    job = members(3, simulated_mbits=mbits)
    job.run(body)
    kind = "shared memory" if mbits is None else "ring"
    assert job.results() == [[kind, kind], [kind, kind], None]


@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_go_on(members, implementation, victim):
    finished = multiprocessing.get_context("fork").Barrier(3)

    def body(communicator: ElasticCommunicator, number: int) -> Any:
        sums = []
        for step in range(20):
            if step == 7:
                finished.wait(BOUND_S)  # all have the sums of the steps before
                if number == victim:
                    die()
            sums.append(repeatedly(communicator, 2.0**number)[0])
        return sums, communicator.rank, communicator.world_size, communicator.membership.generation

    job = members(3, implementation)
    job.run(body)
    results = job.results()
    assert results[victim] is None
    left = [number for number in range(3) if number != victim]
    for rank, number in enumerate(left):
        assert results[number] == ([7.0] * 7 + [7.0 - 2.0**victim] * 13, rank, 2, 2)


def test_all_survivors_raise_at_the_same_collective(members):
    """Killed at any moment: who had finished the collective gives its result to who had not."""

    def body(communicator: ElasticCommunicator, number: int) -> Any:
        events: list[Any] = []
        for step in itertools.count():
            if number == 2 and step == 0:
                threading.Timer(0.05 + 0.05 * np.random.default_rng(os.getpid()).random(), die).start()
            try:
                if step % 3 == 0:
                    events.append(float(communicator.all_reduce([np.ones(50_000, np.float32)])[0][0]))
                elif step % 3 == 1:
                    events.append(communicator.broadcast_bytes(b"%d" % step).decode())
                else:
                    events.append([float(part[0]) for part in communicator.all_gather(np.array([float(number)]))])
            except MembershipChangedError:
                events.append("changed")
            if "changed" in events and len(events) > events.index("changed") + 5:
                break
        return events

    for _ in range(3):
        job = members(3)
        job.run(body)
        first, second, third = job.results()
        assert third is None
        assert first == second, job.notes
        assert first.count("changed") == 1
        job.close()  # its threads must not be there when the next one is forked


def test_a_result_is_handed_over_again_as_it_was():
    """After a loss in the middle of it, when a member that had passed it repeats its step with the same arrays."""
    sent = []

    def broadcast_bytes(payload: bytes, root: int) -> bytes:
        sent.append(decode(payload))
        return payload

    group: Any = object.__new__(ElasticGroup)
    group.inner = SimpleNamespace(rank=0, broadcast_bytes=broadcast_bytes, barrier=lambda: None)
    group.node = SimpleNamespace(addresses=[SimpleNamespace(completed=5), SimpleNamespace(completed=4)])
    gradients = np.ones(3, np.float32)
    group._completed, group._last = 5, [gradients]
    group._hand_over()
    gradients[:] = 7
    group._hand_over()
    assert [each[0].tolist() for each in sent] == [[1.0] * 3] * 2


def test_down_to_one(members):
    def body(communicator: ElasticCommunicator, number: int) -> Any:
        for step in range(24):
            if number == step // 8:
                die()
            last = repeatedly(communicator, 1.0)[0]
        return last, communicator.world_size

    job = members(4)
    job.run(body)
    assert job.results() == [None, None, None, (1.0, 1)]


def test_a_stopped_member_is_evicted(members):
    def body(communicator: ElasticCommunicator, number: int) -> Any:
        for step in range(6):
            if number == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
            last = repeatedly(communicator, 1.0)[0]
        return last

    job = members(3, timeout_s=4.0)
    job.run(body)
    assert job.results() == [2.0, None, 2.0]
    assert job.evicted == ["worker/1"]


def losing_the_launcher(members: Any, *, stopped: Sequence[int] = ()) -> Members:
    """Two members that train until the launcher is lost, and then return the error.

    Args:
        stopped: those that are stopped before, so that they do not learn of it.
    """
    trains = multiprocessing.get_context("fork").Event()

    def body(communicator: ElasticCommunicator, number: int) -> Any:
        try:
            while True:
                repeatedly(communicator, 1.0)
                trains.set()
        except Exception as error:
            return type(error).__name__, str(error)

    job: Members = members(2)
    job.run(body)
    assert trains.wait(BOUND_S)
    for number in stopped:
        os.kill(job.processes[number].pid, signal.SIGSTOP)
    job.server.close()
    return job


def test_the_launcher_is_lost(members):
    job = losing_the_launcher(members, stopped=[1])
    job.processes[1].kill()
    first, second = job.results()
    assert second is None
    assert first[0] == "RendezvousError"
    assert "lost the launcher" in first[1]


def test_members_that_lose_the_launcher_stop_training(members):
    """It may have started others instead of them, which write the same checkpoints."""
    for name, text in losing_the_launcher(members).results():
        assert name == "RendezvousError"
        assert "lost the launcher" in text


def test_the_late_end_of_a_former_link_does_not_lose_the_process():
    limits = MembershipLimits(minimum=1, maximum=1, expected=1, start_s=BOUND_S, timeout_s=BOUND_S)
    port, credentials = socket.create_server(("127.0.0.1", 0)), Credentials(SECRET)
    server = CoordinatorServer([port], limits, credentials=credentials, job="job", job_actions=mock.Mock())
    coordinator = server.coordinator = mock.MagicMock()
    try:
        ends = []
        for _ in range(2):
            ours, others = socket.socketpair()
            server.adopt(Hello(purpose="", task="worker/0", peer="", incarnation="one"), Link(ours, "worker/0"))
            ends.append(others)
        ends[0].close()
        wait_until(lambda: sum(thread.name == "phalanx-elastic-from-worker/0" for thread in threading.enumerate()) == 1)
        coordinator.lose.assert_not_called()
        ends[1].close()
        wait_until(lambda: coordinator.lose.called)
    finally:
        server.close()


def test_a_former_link_that_ends_before_the_new_one_is_served_does_not_lose_the_process():
    limits = MembershipLimits(minimum=1, maximum=1, expected=1, start_s=BOUND_S, timeout_s=BOUND_S)
    port, credentials = socket.create_server(("127.0.0.1", 0)), Credentials(SECRET)
    server = CoordinatorServer([port], limits, credentials=credentials, job="job", job_actions=mock.Mock())
    spec = ClusterSpec({"worker": ["127.0.0.1:1"]})
    identity = TaskIdentity(spec, Task("worker", 0), JobFacts(), JobConfig(secret=SECRET))
    details, incarnation = msgspec.msgpack.encode(identity.description), identity.description.incarnation
    hello = Hello(purpose="", task="worker/0", peer="", incarnation=incarnation, details=details)
    ours, others = socket.socketpair()
    try:
        server.admit(hello)
        server.adopt(hello, Link(ours, "worker/0"))
        server.admit(hello)  # it has dialled again, and is not answered yet
        others.close()
        wait_until(lambda: all(thread.name != "phalanx-elastic-from-worker/0" for thread in threading.enumerate()))
        assert incarnation in server.coordinator.table.processes
    finally:
        server.close()


def test_a_process_that_does_not_read_for_a_while_misses_no_order_in_the_middle(monkeypatch):
    monkeypatch.setattr(coordinator_server, "SEND_S", 0.01)
    ours, others = socket.socketpair()
    link, reader = Link(ours, "worker/0"), Link(others, "the launcher")
    sender = coordinator_server._Sender("worker/0", link)
    sender.start()
    for generation in range(2000):  # more than the connection holds
        sender.send(membership_messages.GenerationEnded(generation))
    wait_until(lambda: link.closed or sender._messages.qsize() < 1000)
    sender.finish()
    orders = membership_messages.receive(reader, Decoder(membership_messages.FromCoordinator))
    received = [order.generation for order in orders]
    assert received == list(range(len(received)))
    sender.join(BOUND_S)


def test_bytes_and_shapes_of_a_result_that_is_handed_on():
    for result in (None, b"x", [b"a", b""], [np.zeros((0, 3)), np.array(2, np.int32), np.ones((2, 2), np.float16)]):
        back = decode(encode(result))
        if isinstance(result, list) and isinstance(result[0], np.ndarray):
            for one, other in zip(result, back, strict=True):
                assert one.dtype == other.dtype
                assert one.shape == other.shape
                assert (one == other).all()
        else:
            assert back == result


class Silence:
    """Makes a connection half open: the peer's end stays, but nothing comes from here any more, and nothing is read."""

    def __init__(self, link: Link, *, known_here: bool):
        here, far = socket.socketpair()
        here.setblocking(False)  # as the link's own: that lies with the connection, not with its number
        self._kept = (os.dup(link.fileno()), far)  # they stay open as long as this process lives
        os.dup2(here.fileno(), link.fileno())
        here.close()
        if known_here:
            far.shutdown(socket.SHUT_RDWR)


def test_two_that_cannot_reach_each_other_part(members):
    """Both live, and reach the coordinator and the third: the higher rank goes, after one timeout."""
    silent = multiprocessing.get_context("fork").Event()

    def body(communicator: ElasticCommunicator, number: int) -> Any:
        kept = []
        for step in range(6):
            if number == 0 and step == 3:
                kept.append(Silence(communicator.membership.links[1], known_here=False))
                silent.set()
            if step == 3:  # before that, what another one has sent for this step might have arrived
                assert silent.wait(BOUND_S)
            last = repeatedly(communicator, 2.0**number)[0]
        return last, communicator.world_size, len(kept)

    job = members(3, "RING", timeout_s=4.0)
    job.run(body)
    assert job.results() == [(5.0, 2, 1), None, (5.0, 2, 0)]
    assert job.evicted == ["worker/1"]
    assert "worker/1 was evicted: the network between it and other members is cut" in job.notes


def test_a_connection_of_which_one_end_knows_nothing_is_made_again(members):
    """Long before the timeout: the coordinator tells who waits that the generation is over."""

    def body(communicator: ElasticCommunicator, number: int) -> Any:
        kept = []
        for step in range(6):
            if number == 0 and step == 3:
                kept.append(Silence(communicator.membership.links[1], known_here=True))
            last = repeatedly(communicator, 2.0**number)[0]
        return last, communicator.world_size, communicator.membership.generation, len(kept)

    job = members(2, "RING", timeout_s=10 * BOUND_S)
    job.run(body)
    first, second = job.results()
    assert first[:2] == second[:2] == (3.0, 2)
    assert first[2] == second[2] >= 2
    assert job.evicted == []


def test_a_large_result_is_kept_for_one_that_comes_later():
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        port = socket.create_server(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{port.getsockname()[1]}"
        spec = ClusterSpec({"worker": [f"127.0.0.1:{sock.getsockname()[1]}" for sock in (first, second)]})
        limits = MembershipLimits(1, 2, 1, start_s=BOUND_S, timeout_s=BOUND_S)
        actions: Any = mock.Mock()
        server = CoordinatorServer([port], limits, credentials=Credentials(SECRET), job="job", job_actions=actions)
        result = os.urandom(3 * 2**20)

        def node(number: int, sock: socket.socket) -> ElasticNode:
            config = JobConfig(
                secret=SECRET, job_id="job", elastic_coordinator=coordinator, listen_fd=os.dup(sock.fileno())
            )
            return ElasticNode(spec, Task("worker", number), JobFacts(), config)

        try:
            with node(0, first) as chief:
                assert chief.join(0) is None
                chief.coordinator.send(EntryStarted(0))
                chief.coordinator.send(EntryFinished(0, result))
                wait_until(lambda: server.coordinator.entries.current == 1)
                with node(1, second) as late:
                    assert late.joined_late
                    assert late.query_entry(0) == EntryAlreadyFinished(0, result)
        finally:
            server.close()


@pytest.mark.parametrize(
    "collective",
    [
        lambda communicator, array: communicator.all_reduce([array])[0],
        lambda communicator, array: communicator.broadcast([array])[0],
        lambda communicator, array: communicator.all_gather(array)[0],
    ],
    ids=["all_reduce", "broadcast", "all_gather"],
)
def test_what_a_program_does_to_a_result_does_not_reach_a_member_that_lacks_it(collective):
    """`total /= n` on what `strategy.reduce` returns, or a sum in the arrays that were gathered."""
    node: Any = SimpleNamespace(
        membership=Membership(1, 0, (Member(0, "worker/0", "here", "", os.getpid()),)),
        config=SimpleNamespace(collectives=CollectiveConfig()),
        coordinator=SimpleNamespace(is_lost=False),
        is_candidate=False,
        is_regroup_requested=False,
    )
    group = ElasticGroup(node, CommunicationOptions())
    result = collective(ElasticCommunicator(group), np.arange(3.0))
    result *= 10
    handed_over = []
    group.inner = mock.Mock(rank=0, broadcast_bytes=lambda payload, root: handed_over.append(payload) or payload)
    node.addresses = [SimpleNamespace(completed=1), SimpleNamespace(completed=0)]  # the second one lacks the result
    group._hand_over()
    np.testing.assert_array_equal(decode(handed_over[0])[0], np.arange(3.0))


def test_a_worker_that_a_crowded_launcher_drops_from_its_handshake_dials_again(monkeypatch):
    """The launcher drops connections at random while too many are pending; the worker sees what a wrong secret is."""
    dropped = []

    def drop_the_first(handshake: Handshake, data: bytes) -> None:
        if handshake._role is Role.LISTENER and handshake.waits_for_proof and not dropped:
            dropped.append(handshake)
            raise HandshakeError("too many connected at once")
        receive_data(handshake, data)

    receive_data = Handshake.receive_data
    monkeypatch.setattr(Handshake, "receive_data", drop_the_first)
    limits = MembershipLimits(1, 1, 1, start_s=BOUND_S, timeout_s=BOUND_S)
    port = socket.create_server(("127.0.0.1", 0))
    config = JobConfig(secret=SECRET, job_id="job", elastic_coordinator=f"127.0.0.1:{port.getsockname()[1]}")
    server = CoordinatorServer([port], limits, credentials=Credentials(SECRET), job="job", job_actions=mock.Mock())
    identity = TaskIdentity(ClusterSpec({"worker": ["127.0.0.1:1"]}), Task("worker", 0), JobFacts(), config)
    try:
        client = CoordinatorClient(identity, lambda generation: None)
        assert client.response.initial_world_size == 1
        client.close(last=None)
        client.link.close()
    finally:
        server.close()
    assert len(dropped) == 1


@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_values_that_differ_between_ranks_are_exchanged_again(members, implementation):
    """Killed at any moment of an all-to-all and a gathering: all who are left repeat both."""

    def body(communicator: ElasticCommunicator, number: int) -> Any:
        if number == 2:
            threading.Timer(0.05 + 0.05 * np.random.default_rng(os.getpid()).random(), die).start()
        totals = []
        while len(totals) < 200:
            try:
                rows = [np.full(1000, 2.0**number, np.float32)] * communicator.world_size
                total = sum(float(row[0]) for row in communicator.all_to_all(rows))
                gathered = communicator.all_gather(np.array([total]))
                totals.append([float(each[0]) for each in gathered])
            except MembershipChangedError:
                continue
        while communicator.world_size > 2:
            repeatedly(communicator, 1.0)
        return totals

    for _ in range(2):
        job = members(3, implementation)
        job.run(body)
        first, second, third = job.results()
        assert third is None
        assert first == second, job.notes
        assert {tuple(totals) for totals in first} <= {(7.0,) * 3, (3.0,) * 2}
        job.close()
