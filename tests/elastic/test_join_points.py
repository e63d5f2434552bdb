"""Where others may join: a pure decision."""

from __future__ import annotations

from phalanx.elastic.join_points import JoinPoints


def may_join_before_a_step(points: JoinPoints) -> bool:
    points.at_boundary = True
    return points.next_collective()


def test_others_join_before_steps_and_anywhere_in_an_open_section() -> None:
    points = JoinPoints()
    assert not points.next_collective()
    assert may_join_before_a_step(points)
    assert not points.next_collective()  # the boundary was that of one collective
    with points.anywhere():
        assert points.next_collective()


def test_a_call_within_a_closed_call_leaves_it_closed() -> None:
    """A custom loop calls `fit`, whose callback calls `predict`: a process that joins would make neither call."""
    points = JoinPoints()
    with points.anywhere():
        with points.blocked():
            with points.blocked():
                assert not may_join_before_a_step(points)
            assert not may_join_before_a_step(points)
            assert not points.next_collective()
        assert points.consume_blocked()
        assert points.next_collective()
