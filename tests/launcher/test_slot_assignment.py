"""Which worker runs where: decided without any process."""

from __future__ import annotations

from phalanx.launcher.elastic_hosts.slot_assignment import HostSlot, SlotAssignment


def filled(slots: SlotAssignment, usable: int = 9) -> list[tuple[int, str, int]]:
    return [(rank, slot.host, slot.number) for rank, slot in slots.assign(lambda host: usable)]


def test_first_seats_take_the_first_hosts() -> None:
    slots = SlotAssignment(range(4), 4)
    slots.set_hosts({"a": 2, "b": 1})
    assert filled(slots) == [(0, "a", 0), (1, "a", 1), (2, "b", 0)]
    assert filled(slots) == []
    slots.set_hosts({"b": 1, "c": 5, "a": 2})
    assert filled(slots) == [(3, "c", 0)]


def test_a_host_that_cannot_be_used_now_is_passed_over() -> None:
    slots = SlotAssignment(range(2), 2)
    slots.set_hosts({"a": 2, "b": 2})
    assert slots.assign(lambda host: 0 if host == "a" else 2) == [(0, HostSlot("b", 0)), (1, HostSlot("b", 1))]


def test_a_waiting_worker_goes_to_any_free_slot() -> None:
    slots = SlotAssignment(range(3), 3)
    slots.set_hosts({"a": 2, "b": 2})
    filled(slots)
    slots.free(0)
    assert slots.assign(lambda host: 2 if host == "b" else 0) == [(0, HostSlot("b", 1))]
    assert slots.ranks_on("b") == [0, 2]


def test_workers_of_a_host_that_is_taken_back_are_sent_away_once() -> None:
    slots = SlotAssignment(range(3), 3)
    slots.set_hosts({"a": 2, "b": 1})
    filled(slots)
    slots.set_hosts({"b": 1})
    assert slots.withdraw() == [0, 1]
    assert slots.withdraw() == []
    assert not slots.keeps_slot(0)
    assert slots.keeps_slot(2)
    assert slots.unused_hosts(["a", "b"]) == []
    slots.free(0)
    slots.free(1)
    assert slots.unused_hosts(["a", "b"]) == ["a"]


def test_a_host_with_fewer_slots_gives_up_the_last_ones() -> None:
    slots = SlotAssignment(range(2), 2)
    slots.set_hosts({"a": 2})
    filled(slots)
    slots.set_hosts({"a": 1})
    assert slots.withdraw() == [1]


def test_no_more_than_are_wanted() -> None:
    slots = SlotAssignment(range(3), 3)
    slots.set_hosts({"a": 3})
    filled(slots)
    slots.target = 2
    slots.free(0)
    assert filled(slots) == []
    slots.target = 3
    assert filled(slots) == [(0, "a", 0)]


def test_one_that_was_given_up_is_not_started_elsewhere() -> None:
    slots = SlotAssignment(range(2), 2)
    slots.set_hosts({"a": 1, "b": 1})
    filled(slots)
    slots.retire(1)
    assert filled(slots) == []
