"""Which members leave when some cannot reach each other."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.membership_messages import LossReport
from phalanx.elastic.network_partitions import MAX_COMPLAINTS, ConnectionFailures, choose_evictions


def report(*missing: str, late: bool = False, completed: int = 5) -> LossReport:
    return LossReport(1, completed, True, timeout_text="late" if late else "", unreachable=list(missing))


@given(st.integers(1, 5), st.integers(0, 4), st.randoms())
def test_of_a_job_that_fell_in_two_the_minority_goes(majority, smaller, random):
    minority = min(smaller, majority - 1)
    members = [f"m{number}" for number in range(majority + minority)]
    shuffled = random.sample(members, len(members))
    many, few = shuffled[:majority], shuffled[majority:]
    severed = {frozenset(pair) for pair in itertools.product(many, few)}
    assert set(choose_evictions(members, severed, [])) == set(few)


def test_of_two_halves_the_one_without_the_chief_goes():
    severed = {frozenset(pair) for pair in itertools.product("ab", "cd")}
    assert sorted(choose_evictions("abcd", severed, "")) == ["c", "d"]


def test_of_two_the_higher_rank_goes_but_not_the_only_one_that_has_the_state():
    assert choose_evictions("abc", [frozenset("bc")], "") == ["c"]
    assert choose_evictions("ab", [frozenset("ab")], "a") == ["a"]
    assert choose_evictions("abc", [frozenset("ab"), frozenset("ac")], "bc") == ["c", "b"]


@given(st.integers(2, 6), st.data())
def test_afterwards_no_severed_pair_is_left_and_somebody_knows_the_state(count, data):
    members = [f"m{number}" for number in range(count)]
    pairs = [frozenset(pair) for pair in itertools.combinations(members, 2)]
    severed = data.draw(st.sets(st.sampled_from(pairs)))
    needing_state = data.draw(st.sets(st.sampled_from(members), max_size=count - 1))
    stay = set(members) - set(choose_evictions(members, severed, needing_state))
    assert not [pair for pair in severed if pair <= stay]
    assert stay - needing_state


def test_who_is_dead_is_nobodys_quarrel():
    failures = ConnectionFailures()
    failures.record(1, {"a": report("c", late=True), "b": report("c", late=True)})
    assert not failures.severed
    assert not failures.broken


def test_the_same_pair_again_and_again_without_progress():
    """Another pair in between, so that the pair has not replaced its link right before."""
    failures = ConnectionFailures()
    for generation in range(1, 2 * MAX_COMPLAINTS):
        assert not failures.severed
        a, b = (report("b"), report()) if generation % 2 else (report(), report("c"))
        failures.record(generation, {"a": a, "b": b, "c": report()})
        failures.record(generation, {"a": a, "b": b, "c": report()})  # asked again, while members are waited for
    assert failures.severed == {frozenset("ab")}
