"""Which hosts are blacklisted, and for how long."""

from __future__ import annotations

from phalanx.launcher.elastic_hosts.host_blacklist import FAILURES, WITHIN_S, BlacklistedHost, HostBlacklist


def test_several_failures_in_short_order_blacklist_a_host() -> None:
    blacklist = HostBlacklist((10.0, 600.0))
    assert [blacklist.worker_failed("a", now) for now in (0.0, 1.0, 2.0)] == [
        None,
        None,
        BlacklistedHost(10.0, "3 of its workers failed"),
    ]
    assert blacklist.is_blacklisted("a", 11.9)
    assert not blacklist.is_blacklisted("b", 11.9)
    assert blacklist.hosts(4.0)["a"].seconds == 8.0
    assert blacklist.hosts(4.0)["a"].reason == "3 of its workers failed"
    assert not blacklist.is_blacklisted("a", 12.0)


def test_failures_that_lie_far_apart_do_not() -> None:
    blacklist = HostBlacklist()
    assert [blacklist.worker_failed("a", n * WITHIN_S) for n in range(3 * FAILURES)] == [None] * 3 * FAILURES


def test_the_next_failure_after_its_return_blacklists_it_for_longer() -> None:
    blacklist = HostBlacklist((10.0, 25.0))
    for now in (0.0, 0.0, 0.0):
        blacklist.worker_failed("a", now)
    assert not blacklist.is_blacklisted("a", 10.0)
    assert blacklist.worker_failed("a", 15.0) == BlacklistedHost(20.0, "a worker failed again")
    assert not blacklist.is_blacklisted("a", 35.0)
    assert blacklist.worker_failed("a", 36.0) == BlacklistedHost(25.0, "a worker failed again")


def test_one_that_has_done_well_for_long_starts_over() -> None:
    blacklist = HostBlacklist((10.0, 25.0))
    assert blacklist.unreachable("a", 0.0) == 10.0
    assert not blacklist.is_blacklisted("a", 10.0)
    assert blacklist.worker_failed("a", 100.0) is None
    assert blacklist.unreachable("a", 101.0) == 10.0


def test_those_that_still_run_on_it_fail_with_the_others() -> None:
    blacklist = HostBlacklist((10.0, 600.0))
    assert blacklist.unreachable("a", 0.0) == 10.0
    assert blacklist.worker_failed("a", 1.0) is None
    assert blacklist.unreachable("a", 4.0) == 6.0
