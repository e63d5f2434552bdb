"""Slow workers of jobs of fixed size, from what they note in the page that they share with their launcher."""

from __future__ import annotations

from phalanx.launcher.host_messages import StepTimingReported
from phalanx.launcher.straggler_watch import StragglerWatch


def test_a_slow_worker_is_named_until_it_has_ended() -> None:
    comparison = StragglerWatch()
    said: list[str] = []
    for second in range(20):
        for rank, computes in ((0, 0.4), (1, 1.0), (2, 0.4)):
            pace = StepTimingReported(rank, second * computes, second * (1 - computes), 10 * second)
            said += comparison.add(pace, f"worker/{rank}", float(second))
    assert said == [
        "worker/1 (rank 1) is slow, and the others wait for it: it computes for 100 ms per step, the others for 40 ms"
    ]
    comparison.forget(1)
    for second in range(20, 40):
        for rank in (0, 2):
            pace = StepTimingReported(rank, second * 0.4, second * 0.6, 10 * second)
            assert comparison.add(pace, f"worker/{rank}", float(second)) == []
