"""Which hosts are set aside, and for how long."""

from __future__ import annotations

from phalanx.launcher.host_blacklist import FAILURES, WITHIN_S, HostBlacklist


def test_several_failures_in_short_order_set_a_host_aside() -> None:
    standing = HostBlacklist((10.0, 600.0))
    assert [standing.failed("a", now) for now in (0.0, 1.0, 2.0)] == [None, None, 10.0]
    assert standing.is_aside("a", 11.9)
    assert not standing.is_aside("b", 11.9)
    assert standing.aside(4.0)["a"].seconds == 8.0
    assert standing.aside(4.0)["a"].reason == "3 of its workers failed"
    assert not standing.is_aside("a", 12.0)


def test_failures_that_lie_far_apart_do_not() -> None:
    standing = HostBlacklist()
    assert [standing.failed("a", n * WITHIN_S) for n in range(3 * FAILURES)] == [None] * 3 * FAILURES


def test_the_next_failure_after_its_return_sets_it_aside_for_longer() -> None:
    standing = HostBlacklist((10.0, 25.0))
    for now in (0.0, 0.0, 0.0):
        standing.failed("a", now)
    assert not standing.is_aside("a", 10.0)
    assert standing.failed("a", 15.0) == 20.0
    assert not standing.is_aside("a", 35.0)
    assert standing.failed("a", 36.0) == 25.0


def test_one_that_has_done_well_for_long_begins_anew() -> None:
    standing = HostBlacklist((10.0, 25.0))
    assert standing.unreachable("a", 0.0) == 10.0
    assert not standing.is_aside("a", 10.0)
    assert standing.failed("a", 100.0) is None
    assert standing.unreachable("a", 101.0) == 10.0


def test_those_that_still_run_on_it_fail_with_the_others() -> None:
    standing = HostBlacklist((10.0, 600.0))
    assert standing.unreachable("a", 0.0) == 10.0
    assert standing.failed("a", 1.0) is None
    assert standing.unreachable("a", 4.0) == 6.0
