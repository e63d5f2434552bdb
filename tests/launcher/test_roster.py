"""Which worker runs where: decided without any process."""

from __future__ import annotations

from phalanx.launcher.slot_assignment import HostSlot, SlotAssignment


def filled(roster: SlotAssignment, slots: int = 9) -> list[tuple[int, str, int]]:
    return [(rank, slot.host, slot.number) for rank, slot in roster.fill(lambda host: slots)]


def test_first_seats_take_the_first_hosts() -> None:
    roster = SlotAssignment(range(4), 4)
    roster.offer({"a": 2, "b": 1})
    assert filled(roster) == [(0, "a", 0), (1, "a", 1), (2, "b", 0)]
    assert filled(roster) == []
    roster.offer({"b": 1, "c": 5, "a": 2})
    assert filled(roster) == [(3, "c", 0)]


def test_a_host_that_cannot_be_used_now_is_passed_over() -> None:
    roster = SlotAssignment(range(2), 2)
    roster.offer({"a": 2, "b": 2})
    assert roster.fill(lambda host: 0 if host == "a" else 2) == [(0, HostSlot("b", 0)), (1, HostSlot("b", 1))]


def test_a_vacant_seat_goes_to_any_free_slot() -> None:
    roster = SlotAssignment(range(3), 3)
    roster.offer({"a": 2, "b": 2})
    filled(roster)
    roster.leave(0)
    assert roster.fill(lambda host: 2 if host == "b" else 0) == [(0, HostSlot("b", 1))]
    assert roster.ranks_on("b") == [0, 2]


def test_workers_of_a_host_that_is_taken_back_are_sent_away_once() -> None:
    roster = SlotAssignment(range(3), 3)
    roster.offer({"a": 2, "b": 1})
    filled(roster)
    roster.offer({"b": 1})
    assert roster.send_away() == [0, 1]
    assert roster.send_away() == []
    assert not roster.stays(0)
    assert roster.stays(2)
    assert roster.left_behind(["a", "b"]) == []
    roster.leave(0)
    roster.leave(1)
    assert roster.left_behind(["a", "b"]) == ["a"]


def test_a_host_with_fewer_slots_gives_up_the_last_ones() -> None:
    roster = SlotAssignment(range(2), 2)
    roster.offer({"a": 2})
    filled(roster)
    roster.offer({"a": 1})
    assert roster.send_away() == [1]


def test_no_more_than_are_wanted() -> None:
    roster = SlotAssignment(range(3), 3)
    roster.offer({"a": 3})
    filled(roster)
    roster.wanted = 2
    roster.leave(0)
    assert filled(roster) == []
    roster.wanted = 3
    assert filled(roster) == [(0, "a", 0)]


def test_one_that_was_given_up_is_not_started_elsewhere() -> None:
    roster = SlotAssignment(range(2), 2)
    roster.offer({"a": 1, "b": 1})
    filled(roster)
    roster.retire(1)
    assert filled(roster) == []
