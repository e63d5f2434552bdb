"""Failures, really made: killed, stopped and failing members, calls that differ, ranks that do not come."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from phalanx.cluster.membership import Membership
from phalanx.collectives import CommunicationImplementation, CommunicationOptions, ReduceOp, connect
from phalanx.collectives.host import mesh
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.collectives.host.peer_failures import AbortNotice
from phalanx.collectives.host.shared_memory_algorithm import SharedMemoryAlgorithm
from phalanx.collectives.operation import CollectiveCall, prepare
from phalanx.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigurationError,
    DisagreementError,
    PeerLostError,
    PhalanxError,
    UnsupportedError,
)
from phalanx.transport.decoding import decode_message
from tests.collectives.kinds import KINDS, Kind
from tests.support.processes import Job, run_ranks, values

KINDS_BY_NAME = {kind.name: kind for kind in KINDS}
SEVERAL = [KINDS_BY_NAME[name] for name in ("shared2", "ring3", "hierarchical-uneven")]
MORE = [KINDS_BY_NAME[name] for name in ("shared5", "ring2", "hierarchical-even")]
all_kinds = pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, id=kind.name) for kind in SEVERAL),
        *(pytest.param(kind, id=kind.name, marks=pytest.mark.slow) for kind in MORE),
    ],
)

one_kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.name, marks=[] if kind.name == "ring3" else pytest.mark.slow)
        for kind in SEVERAL + MORE
    ],
)
"""For tests that wait until a time is up."""

NOTICED_S = 5.0
"""What the project promises; a death is noticed in milliseconds."""


def fail_together(
    kind: Kind, body: Callable[[HostCommunicator], Any], timeout_s: float = 20.0
) -> list[BaseException | None]:
    """The error of each rank after `body(communicator)`."""

    def function(membership: Membership) -> None:
        communicator = kind.connect(membership, timeout_s)
        try:
            body(communicator)
        finally:
            communicator.close()

    return [outcome.error for outcome in run_ranks(function, hosts=kind.hosts)]


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def test_an_abort_tells_an_error_whose_text_is_no_utf8() -> None:
    notice = AbortNotice.of(PhalanxError("cannot read /data/\udcff"))
    assert decode_message(msgspec.msgpack.encode(notice), AbortNotice).text.endswith(r"/data/\udcff")


# --------------------------------------------------------------------- mismatches

MISMATCHES: dict[str, tuple[Callable[[HostCommunicator], Any], Callable[[HostCommunicator], Any], list[str]]] = {
    "shape": (
        lambda c: c.all_reduce([ones(4), ones(10, 5)]),
        lambda c: c.all_reduce([ones(4), ones(10, 4)]),
        [
            r"all_reduce on rank {odd} got float32 \(10, 4\) as array 1",
            r"rank {other} brought float32 \(10, 5\)",
            "Pad or drop the last partial batch",
        ],
    ),
    "dtype": (
        lambda c: c.all_reduce([ones(4)]),
        lambda c: c.all_reduce([ones(4, dtype=ml_dtypes.bfloat16)]),
        [r"rank {odd} got bfloat16 \(4,\)", r"rank {other} brought float32 \(4,\)"],
    ),
    "op": (
        lambda c: c.all_reduce([ones(4)]),
        lambda c: c.all_reduce([ones(4)], ReduceOp.MAX),
        ["rank {odd} called all_reduce.op=max", "rank {other} called all_reduce.op=sum", "same op"],
    ),
    "number of arrays": (
        lambda c: c.all_reduce([ones(4), ones(2)]),
        lambda c: c.all_reduce([ones(4)]),
        ["rank {odd} got 1 arrays; rank {other} brought 2", "layers frozen"],
    ),
    "small against large": (
        lambda c: c.all_reduce([ones(4)]),
        lambda c: c.all_reduce([ones(1_000_000)]),
        [r"rank {odd} got float32 \(1000000,\)", r"rank {other} brought float32 \(4,\)"],
    ),
    "large against small": (
        lambda c: c.all_reduce([ones(1_000_000)]),
        lambda c: c.all_reduce([ones(4)]),
        [r"rank {odd} got float32 \(4,\)", r"rank {other} brought float32 \(1000000,\)"],
    ),
    "empty against large": (
        lambda c: c.all_reduce([]),
        lambda c: c.all_reduce([ones(1_000_000)]),
        ["rank {odd} got 1 arrays; rank {other} brought 0"],
    ),
    "method": (
        lambda c: c.all_reduce([ones(1_000_000)]),
        lambda c: c.barrier(),
        ["rank {odd} called barrier()", "rank {other} called all_reduce", "branch that only some ranks take"],
    ),
    "broadcast against all_to_all": (
        lambda c: c.broadcast([ones(100_000)]),
        lambda c: c.all_to_all([ones(10)] * c.world_size),
        ["rank {odd} called all_to_all", "rank {other} called broadcast"],
    ),
    "root": (
        lambda c: c.broadcast([ones(3)], 0),
        lambda c: c.broadcast([ones(3)], 1),
        ["rank {odd} called broadcast.root=1", "rank {other} called broadcast.root=0", "same root"],
    ),
    "trailing dimension of all_gather": (
        lambda c: c.all_gather(ones(2, 3)),
        lambda c: c.all_gather(ones(2, 4)),
        [r"rank {odd} got float32 \(\*, 4\)", r"rank {other} brought float32 \(\*, 3\)"],
    ),
    "bytes against arrays": (
        lambda c: c.all_gather_bytes(b"x"),
        lambda c: c.reduce_scatter(ones(c.world_size, 3)),
        ["rank {odd} called reduce_scatter", "rank {other} called all_gather_bytes"],
    ),
}


QUICK_ON_ALL_KINDS = ("shape", "small against large", "large against small", "method")
"""How ranks exchange what they call depends on its size and method, for each kind; the comparison is the same code."""


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(
            kind,
            case,
            id=f"{kind.name}-{case}",
            marks=[] if kind is SEVERAL[0] or (kind in SEVERAL and case in QUICK_ON_ALL_KINDS) else pytest.mark.slow,
        )
        for kind in SEVERAL + MORE
        for case in MISMATCHES
    ],
)
def test_ranks_that_call_different_things_all_raise_the_same_message(kind: Kind, case: str) -> None:
    usual, odd_call, patterns = MISMATCHES[case]
    # With two ranks there is no majority, and rank 0 is the reference.
    odd = kind.world_size - 1

    def body(communicator: HostCommunicator) -> None:
        communicator.all_reduce([ones(10)])
        (odd_call if communicator.rank == odd else usual)(communicator)

    errors = fail_together(kind, body)
    assert all(isinstance(error, CollectiveMismatchError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    for pattern in patterns:
        with pytest.raises(CollectiveMismatchError, match=pattern.format(odd=odd, other=0)):
            raise errors[0]  # type: ignore[misc]


def test_a_rank_that_is_stopped_in_another_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "DESCRIBE_S", 0.5)

    def function(membership: Membership) -> None:
        communicator = connect(membership)
        algorithm = communicator.runner.algorithm
        if membership.rank == 1:
            assert isinstance(algorithm, SharedMemoryAlgorithm)
            algorithm._counters.post(CollectiveCall(1, prepare("barrier"), 0.0, 0.0))
            os.kill(os.getpid(), signal.SIGSTOP)
        communicator.all_reduce([ones(3)])

    with Job(function, ["a", "a"]) as job:
        outcome = job.outcomes(without=[1])[0]
    assert isinstance(outcome.error, CollectiveMismatchError)
    assert "rank 1 called something else" in str(outcome.error)


# ----------------------------------------------------------------- lost members


def loop(communicator: HostCommunicator, size: int = 300_000) -> None:
    arrays, out = [ones(size), ones(7)], [ones(size), ones(7)]
    while True:
        communicator.all_reduce(arrays, out=out)


@all_kinds
@pytest.mark.parametrize(
    ("victim", "size"),
    [
        ("first", 4),
        ("last", 300_000),
        pytest.param("first", 300_000, marks=pytest.mark.slow),
        pytest.param("last", 4, marks=pytest.mark.slow),
    ],
)
def test_a_killed_member_is_named_by_all_others_at_once(kind: Kind, victim: str, size: int) -> None:
    rank = 0 if victim == "first" else kind.world_size - 1

    def function(membership: Membership) -> None:
        communicator = kind.connect(membership)
        communicator.barrier()
        if membership.rank == rank:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        loop(communicator, size)

    outcomes = run_ranks(function, hosts=kind.hosts)
    assert outcomes[rank].exit_code == -signal.SIGKILL
    for other, outcome in enumerate(outcomes):
        if other != rank:
            assert isinstance(outcome.error, PeerLostError), outcome
            assert outcome.error.rank == rank
            assert outcome.error.task == f"worker/{rank}"
            assert "all_reduce" in str(outcome.error)
            assert outcome.ended - outcomes[rank].ended < NOTICED_S


@all_kinds
def test_a_member_that_dies_while_others_wait_for_it_is_named(kind: Kind) -> None:
    def function(membership: Membership) -> None:
        communicator = kind.connect(membership)
        if membership.rank == kind.world_size - 1:
            time.sleep(0.5)  # Until the others sleep in poll; nothing depends on it.
            os._exit(0)
        communicator.barrier()

    for rank, outcome in enumerate(run_ranks(function, hosts=kind.hosts)[:-1]):
        assert isinstance(outcome.error, PeerLostError), (rank, outcome)
        assert outcome.error.rank == kind.world_size - 1


@all_kinds
def test_an_exception_on_one_rank_ends_the_others_with_its_name(kind: Kind) -> None:
    def function(membership: Membership) -> None:
        with kind.connect(membership) as communicator:
            if membership.rank == 1:
                raise ZeroDivisionError("mine")
            communicator.all_reduce([ones(300_000)])

    for rank, outcome in enumerate(run_ranks(function, hosts=kind.hosts)):
        if rank == 1:
            assert isinstance(outcome.error, ZeroDivisionError)
        else:
            assert isinstance(outcome.error, PeerLostError), outcome
            assert outcome.error.rank == 1


@all_kinds
def test_an_interrupt_inside_a_collective_ends_the_others(kind: Kind) -> None:
    read, write = os.pipe()  # from rank 0, when it has been interrupted

    def function(membership: Membership) -> None:
        communicator = kind.connect(membership)
        communicator.barrier()
        if membership.rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                communicator.barrier()  # Rank 1 stays away until rank 0 has been interrupted.
            finally:
                os.write(write, b"!")
        else:
            if membership.rank == 1:
                os.read(read, 1)
            communicator.barrier()  # What rank 0 has sent over a link cannot be taken back: this may end well.
            communicator.barrier()

    outcomes = run_ranks(function, hosts=kind.hosts)
    os.close(read)
    os.close(write)
    assert isinstance(outcomes[0].error, KeyboardInterrupt)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, PeerLostError), outcome
        assert outcome.error.rank == 0
        assert "KeyboardInterrupt" in str(outcome.error)


# ------------------------------------------------------------------- slow members


@one_kind
def test_a_member_that_does_not_come_is_named_when_the_time_is_up(kind: Kind) -> None:
    absent = kind.world_size - 1
    read, write = os.pipe()  # from each of the others, when it has given up

    def function(membership: Membership) -> None:
        communicator = kind.connect(membership)
        communicator.barrier()
        communicator.runner._timeout_s = 1.0
        if membership.rank == absent:
            for _ in range(absent):
                os.read(read, 1)  # Then it learns what happened.
        try:
            communicator.all_reduce([ones(300_000)])
        finally:
            os.write(write, b"!")

    outcomes = run_ranks(function, hosts=kind.hosts)
    os.close(read)
    os.close(write)
    # Who comes late finds the others' reason, unless it was behind more bytes than a link holds.
    assert isinstance(outcomes.pop(absent).error, (CollectiveTimeoutError, PeerLostError))
    for outcome in outcomes:
        assert isinstance(outcome.error, CollectiveTimeoutError), outcome
        assert f"for worker/{absent} (rank {absent}," in str(outcome.error)
        assert "py-spy" in str(outcome.error)


@one_kind
def test_a_stopped_member_is_named_when_the_time_is_up(kind: Kind) -> None:
    stopped = 1

    def function(membership: Membership) -> None:
        communicator = kind.connect(membership)
        for _ in range(20):
            communicator.all_reduce([ones(300_000)])
        communicator.runner._timeout_s = 1.5
        if membership.rank == stopped:
            # Between two collectives. In the middle of one it may have told the others that it is there.
            os.kill(os.getpid(), signal.SIGSTOP)
        loop(communicator)

    with Job(function, kind.hosts) as job:
        outcomes = job.outcomes(without=[stopped])
        for rank, outcome in enumerate(outcomes):
            if rank != stopped:
                assert isinstance(outcome.error, CollectiveTimeoutError), (rank, outcome)
                assert f"worker/{stopped} (rank {stopped}," in str(outcome.error)
        job.signal(stopped, signal.SIGCONT)
        outcome = job.outcomes(without=[rank for rank in range(kind.world_size) if rank != stopped])[stopped]
        assert isinstance(outcome.error, (CollectiveTimeoutError, PeerLostError))


@all_kinds
def test_a_member_that_was_stopped_for_less_than_the_timeout_goes_on(kind: Kind) -> None:
    def function(membership: Membership) -> int:
        with kind.connect(membership) as communicator:
            communicator.barrier()
            if membership.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return sum(int(communicator.all_reduce([ones(100_000)])[0][0]) for _ in range(10))

    with Job(function, kind.hosts) as job:
        until = time.monotonic() + 20
        while "T" not in _state(job.processes[1].pid):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.5)
        job.signal(1, signal.SIGCONT)
        assert values(job.outcomes()) == [10 * kind.world_size] * kind.world_size


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


# ----------------------------------------------------------- after a failure, endings


@all_kinds
def test_after_a_failure_every_call_raises_it_again_until_close(kind: Kind) -> None:
    def function(membership: Membership) -> list[str]:
        communicator = kind.connect(membership, timeout_s=50.0)
        found = []
        for call in (
            lambda: communicator.all_reduce([ones(2 + communicator.rank)]),
            communicator.barrier,
            lambda: communicator.run_async("all_reduce", lambda: communicator.all_reduce([ones(2)])),
        ):
            try:
                call()
            except CollectiveMismatchError as error:
                found.append(str(error))
        communicator.close()
        communicator.close()
        return found

    for found in values(run_ranks(function, hosts=kind.hosts)):
        assert len(found) == 3
        assert len(set(found)) == 1


@all_kinds
def test_an_asynchronous_failure_reaches_the_handle_and_those_behind_it(kind: Kind) -> None:
    def function(membership: Membership) -> list[str]:
        communicator = kind.connect(membership)
        sizes = [3, 4 if membership.rank else 5, 6]
        handles = [
            communicator.run_async("all_reduce", partial(communicator.all_reduce, [ones(size)])) for size in sizes
        ]
        found = []
        for handle in handles:
            try:
                handle.wait(30.0)
                found.append("fine")
            except CollectiveMismatchError:
                found.append("mismatch")
        communicator.close()
        return found

    for found in values(run_ranks(function, hosts=kind.hosts)):
        assert found == ["fine", "mismatch", "mismatch"]


@all_kinds
def test_close_cuts_short_what_runs_in_the_background(kind: Kind) -> None:
    def function(membership: Membership) -> str:
        communicator = kind.connect(membership)
        communicator.barrier()
        if membership.rank == 0:
            # The others never come.
            handle = communicator.run_async("all_reduce", lambda: communicator.all_reduce([ones(3)]))
            communicator.close()
            with pytest.raises(PhalanxError, match="closed"):
                handle.wait(5.0)
            return "closed"
        # By its failure, the others learn that rank 0 has left.
        with pytest.raises((PeerLostError, CollectiveMismatchError), match=r"closed its communicator|rank 0"):
            communicator.all_reduce([ones(4)])  # other than rank 0's, which may have begun
        return "lost"

    found = values(run_ranks(function, hosts=kind.hosts))
    assert found == ["closed"] + ["lost"] * (kind.world_size - 1)


@all_kinds
def test_a_rank_may_end_right_after_its_last_collective_without_closing(kind: Kind) -> None:
    def function(membership: Membership) -> int:
        communicator = kind.connect(membership)
        total = 0
        for _ in range(5):
            total += int(communicator.all_reduce([ones(200_000)])[0][-1])
        communicator.broadcast([ones(200_000)], root=1)
        return total

    assert set(values(run_ranks(function, hosts=kind.hosts))) == {5 * kind.world_size}


@all_kinds
def test_communicators_may_follow_each_other_on_the_same_links(kind: Kind) -> None:
    def function(membership: Membership) -> list[int]:
        found = []
        for turn in range(5):
            with kind.connect(membership) as communicator:
                found.append(int(communicator.all_reduce([ones(100_000) * turn])[0][0]))
        return found

    for found in values(run_ranks(function, hosts=kind.hosts)):
        assert found == [kind.world_size * turn for turn in range(5)]


@all_kinds
def test_a_new_communicator_works_after_one_that_failed(kind: Kind) -> None:
    def function(membership: Membership) -> int:
        communicator = kind.connect(membership)
        with pytest.raises(CollectiveMismatchError):
            communicator.all_reduce([ones(500_000 + membership.rank)])
        communicator.close()
        with kind.connect(membership) as communicator:
            return int(communicator.all_reduce([ones(100_000)])[0][0])

    assert set(values(run_ranks(function, hosts=kind.hosts))) == {kind.world_size}


@all_kinds
def test_nothing_is_left_open(kind: Kind) -> None:
    def function(membership: Membership) -> tuple[int, int]:
        def count() -> int:
            return len(os.listdir("/proc/self/fd"))

        def mapped() -> int:
            with open("/proc/self/maps") as file:
                # Not by the whole path: the project itself may lie in a folder of that name.
                return sum(line.rpartition("/")[2].startswith(("phalanx", "memfd:phalanx")) for line in file)

        with kind.connect(membership) as communicator:
            communicator.barrier()
        before = count()
        for _ in range(5):
            with kind.connect(membership) as communicator:
                communicator.all_reduce([ones(100_000)])
                communicator.run_async("all_reduce", lambda: communicator.all_reduce([ones(10)])).wait(20.0)
        assert not [t for t in threading.enumerate() if t.name.startswith("phalanx")]
        return count() - before, mapped()

    for leaked, mapped in values(run_ranks(function, hosts=kind.hosts)):
        assert leaked == 0
        assert mapped == 0


@pytest.mark.parametrize("name", ["shared2", pytest.param("ring2", marks=pytest.mark.slow)])
def test_a_fork_of_a_rank_is_no_rank(name: str) -> None:
    """It has the memory that the ranks share, and could answer the others for its parent."""

    def body(communicator: HostCommunicator) -> float:
        # In a thread, which a fork does not have.
        communicator.run_async("all_reduce", lambda: communicator.all_reduce([ones(3)])).wait()
        if communicator.rank == 0:
            child = os.fork()
            if not child:
                code = 1
                try:
                    communicator.all_reduce([100 * ones(3)])
                except UnsupportedError:
                    communicator.close()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
        return float(communicator.all_reduce([ones(3)])[0][0])

    assert KINDS_BY_NAME[name].run(body) == [2.0, 2.0]


def test_a_job_killed_while_it_connects_leaves_no_shared_memory() -> None:
    def function(membership: Membership) -> None:
        if membership.rank == 0:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            connect(membership).close()

    before = set(Path("/dev/shm").glob("phalanx*"))
    run_ranks(function, 3)
    assert set(Path("/dev/shm").glob("phalanx*")) <= before


# ------------------------------------------------------------------------ connecting


def test_options_that_differ_are_an_error_on_all_ranks() -> None:
    def function(membership: Membership) -> None:
        connect(membership, CommunicationOptions(bytes_per_pack=1024 * membership.rank, timeout_seconds=50.0))

    for outcome in run_ranks(function, 3):
        assert isinstance(outcome.error, DisagreementError)
        assert "bytes_per_pack = 0" in str(outcome.error)
        assert "bytes_per_pack of" not in str(outcome.error)


def test_nccl_is_an_error_that_names_what_works() -> None:
    options = CommunicationOptions(implementation=CommunicationImplementation.NCCL)
    with pytest.raises(ConfigurationError, match=r"GPUs.*AUTO or RING"):
        connect(Membership(1, 0, ()), options)


@pytest.mark.parametrize("methods", [("/no/such/directory", "memfd"), ("/no/such/directory",)])
def test_where_memory_cannot_be_shared_the_next_way_is_taken(methods: tuple[str, ...]) -> None:
    def function(membership: Membership) -> str:
        with connect(membership, segment_methods=methods) as communicator:
            communicator.barrier()
            return communicator.kind

    kind = "shared memory" if "memfd" in methods else "ring"
    assert values(run_ranks(function, 3)) == [kind] * 3


def test_hosts_that_differ_in_what_they_can_share_stay_in_step() -> None:
    def function(membership: Membership) -> int:
        methods = ("memfd", "tmp") if membership.local_member.host == "a" else ("/no/such/directory", "/nor/this")
        with connect(membership, segment_methods=methods) as communicator:
            return int(communicator.all_reduce([ones(50_000)])[0][0])

    assert values(run_ranks(function, hosts=["a", "b", "a", "b"])) == [4] * 4


def test_a_peer_that_is_gone_before_connecting_is_named() -> None:
    def function(membership: Membership) -> None:
        if membership.rank == 2:
            os._exit(3)
        connect(membership)

    outcomes = run_ranks(function, 3)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, PeerLostError)
        assert outcome.error.rank == 2


def test_a_closed_communicator_does_not_count_as_a_death_for_those_who_need_nothing_more() -> None:
    def function(membership: Membership) -> str:
        communicator = connect(membership)
        communicator.barrier()
        communicator.close()
        membership.close()
        with pytest.raises(PhalanxError, match="closed"):
            communicator.barrier()
        return communicator.kind

    assert values(run_ranks(function, 4)) == ["shared memory"] * 4
