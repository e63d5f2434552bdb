"""What can begin, who is missing, what is remembered: decisions without processes."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.horovod.horovod_environment import HorovodEnvironment
from phalanx.horovod.negotiation import RankRequests, RequestCache, absent_ranks, decide, fuse
from phalanx.horovod.operation_request import HorovodOp, OperationKind, Request, describe_mismatch


def request(name: str, shape=(2,), kind=OperationKind.ALLREDUCE, op=HorovodOp.SUM, dtype="float32", **more) -> Request:
    return Request(name, kind.value, (dtype,), (shape,), op.value if kind is OperationKind.ALLREDUCE else "", **more)


A, B, C = request("a"), request("b"), request("c")


def test_what_all_ranks_ask_for_begins_in_one_order_whatever_theirs() -> None:
    verdicts = decide([[A, B, C], [C, A], [B, A, C]], joined=())
    assert [verdict.request.name for verdict in verdicts] == ["a", "c"]
    assert not any(verdict.error for verdict in verdicts)


def test_nothing_begins_while_a_rank_is_missing() -> None:
    assert decide([[A], []], joined=()) == []
    assert absent_ranks([[A, B], [B], []], joined=[2]) == {"a": [1]}


def test_nobody_waits_for_a_rank_that_has_joined() -> None:
    gather = request("g", kind=OperationKind.ALLGATHER)
    done, refused = decide([[A, gather], [A, gather], []], joined=[2])
    assert done.error == ""
    assert "cannot be done after rank 2 has joined" in refused.error
    # What a rank had asked for before it joined does not stand for another rank.
    assert decide([[A], [], [A]], joined=[2]) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (request("a", kind=OperationKind.BROADCAST), "Mismatched operations for 'a': rank 0 requested allreduce"),
        (request("a", op=HorovodOp.MIN), "Mismatched arguments"),
        (request("a", shape=(3,)), "Mismatched shapes for 'a': rank 0 has (2,), rank 1 has (3,)."),
        (request("a", dtype="int32"), "Mismatched data types"),
        (request("a", prescale=2.0), "Mismatched scale factors"),
        (Request("a", "allreduce", ("float32",) * 2, ((2,),) * 2, "Sum"), "rank 0 has 1 tensors, rank 1 has 2."),
    ],
)
def test_a_difference_names_both_sides(other: Request, words: str) -> None:
    assert words in describe_mismatch("a", [(0, A), (1, other)])
    (verdict,) = decide([[A], [other]], joined=())
    assert words in verdict.error
    assert describe_mismatch("a", [(0, A), (1, request("a"))]) == ""


def test_the_root_of_a_broadcast_must_be_the_same() -> None:
    roots = [request("a", kind=OperationKind.BROADCAST, root=root) for root in (0, 1)]
    assert "Mismatched root ranks" in describe_mismatch("a", list(enumerate(roots)))


def test_what_was_agreed_on_has_a_number_until_it_changes() -> None:
    cache = RequestCache(capacity=2)
    for each in (A, B):
        cache.add(each)
    assert (cache.number_of(A), cache.number_of(B), cache.number_of(C)) == (0, 1, None)
    assert cache.number_of(request("a", shape=(3,))) is None
    cache.add(request("a", shape=(3,)))
    assert cache.number_of(A) is None
    assert cache.number_of(request("a", shape=(3,))) == 0
    assert cache.resolve(RankRequests([0, C])) == [request("a", shape=(3,)), C]


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    cache = RequestCache(capacity=2)
    for each in (A, B, A, C):
        cache.add(each)
    assert (cache.number_of(A), cache.number_of(B), cache.number_of(C)) == (0, None, 1)
    nothing = RequestCache(capacity=0)
    nothing.add(A)
    assert nothing.number_of(A) is None


def test_neighbours_travel_together_up_to_the_threshold() -> None:
    def names(batches):
        return ["".join(each.name for each in batch) for batch in batches]

    small = [request(name) for name in "abcde"]  # 8 bytes each
    assert names(fuse(small, 24)) == ["abc", "de"]
    assert names(fuse(small, 0)) == list("abcde")
    large = [small[0], request("L", shape=(100,)), small[1], small[2]]
    assert names(fuse(large, 24)) == ["a", "L", "bc"]
    mixed = [small[0], request("m", op=HorovodOp.MIN), small[1], request("g", kind=OperationKind.ALLGATHER)]
    assert names(fuse(mixed, 1000)) == ["a", "m", "b", "g"]
    roots = [request(str(root), kind=OperationKind.BROADCAST, root=root) for root in (0, 0, 1)]
    assert [len(batch) for batch in fuse(roots, 1000)] == [2, 1]


def test_knobs_are_horovods_variables() -> None:
    knobs = HorovodEnvironment.from_environment(
        {
            "HOROVOD_FUSION_THRESHOLD": "1024",
            "HOROVOD_CYCLE_TIME": "5",
            "HOROVOD_CACHE_CAPACITY": "0",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
        }
    )
    assert knobs == HorovodEnvironment(1024, 0.005, 0, 10.0, 20.0)
    assert HorovodEnvironment.from_environment({}) == HorovodEnvironment()
    assert HorovodEnvironment.from_environment({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_warning_s == float("inf")
    with pytest.raises(ConfigurationError, match="HOROVOD_CYCLE_TIME='soon'"):
        HorovodEnvironment.from_environment({"HOROVOD_CYCLE_TIME": "soon"})
