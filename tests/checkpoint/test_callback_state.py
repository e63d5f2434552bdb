"""What callbacks have learnt comes back to those of another process."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any

import keras
import numpy as np
import pytest

from phalanx.checkpoint.callback_state import CallbackStateTracker, restore_states


class Collecting(keras.callbacks.Callback):
    """Every kind of container that programs use.

    Args:
        losses, rows: of the program, which reads them when `fit` is over.
    """

    def __init__(self, losses: list[float], rows: Any) -> None:
        super().__init__()
        self.losses = losses
        self.rows = rows
        self.by_epoch: dict[int, float] = {}
        self.counts: Counter[str] = Counter()
        self.lists: defaultdict[str, list[int]] = defaultdict(list)
        self.seen: set[int] = set()
        self.last: deque[int] = deque(maxlen=2)
        self.best: Any = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(0.5 * epoch)
        self.rows[epoch] = epoch
        self.by_epoch[epoch] = 0.5 * epoch
        self.counts["epochs"] += 1
        self.lists["epochs"].append(epoch)
        self.seen.add(epoch)
        self.last.append(epoch)
        self.best = np.full(3, epoch)


def _after(epochs: range, callback: Collecting) -> None:
    for epoch in epochs:
        callback.on_epoch_end(epoch)


def _state(callback: Collecting) -> dict[str, Any]:
    return {name: value for name, value in vars(callback).items() if not name.startswith(("_", "params"))}


def test_containers_continue_as_they_were() -> None:
    first, losses, rows = Collecting([], np.zeros(5)), list[float](), np.zeros(5)
    tracker = CallbackStateTracker([first])
    _after(range(3), first)
    second = Collecting(losses, rows)
    restore_states([second], tracker.changes([first]))
    _after(range(3, 5), second)
    _after(range(3, 5), first)
    np.testing.assert_equal(_state(second), _state(first))
    assert [type(value) for value in _state(second).values()] == [type(value) for value in _state(first).values()]
    assert second.last.maxlen == 2


def test_what_the_program_has_passed_is_what_continues() -> None:
    first, losses, rows = Collecting([], {}), list[float](), dict[int, int]()
    tracker = CallbackStateTracker([first])
    _after(range(3), first)
    second = Collecting(losses, rows)
    restore_states([second], tracker.changes([first]))
    assert losses == [0.0, 0.5, 1.0]
    assert rows == {0: 0, 1: 1, 2: 2}


def test_attributes_that_began_as_one_object_keep_what_each_has_learnt() -> None:
    class Two(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.best = self.last = dict[str, float]()

    first, second = Two(), Two()
    tracker = CallbackStateTracker([first])
    first.best, first.last = {"loss": 1.0}, {"loss": 2.0}
    restore_states([second], tracker.changes([first]))
    assert (second.best, second.last) == ({"loss": 1.0}, {"loss": 2.0})


@pytest.mark.parametrize("rows", [np.zeros(4), np.zeros(5), [0] * 5], ids=["shape", "array", "list"])
def test_arrays_are_replaced(rows: Any) -> None:
    """They may be the memory of a weight, or a file."""
    first = Collecting([], np.zeros(5))
    tracker = CallbackStateTracker([first])
    _after(range(3), first)
    second = Collecting([], rows)
    restore_states([second], tracker.changes([first]))
    np.testing.assert_equal(second.rows, first.rows)
    assert not np.any(rows)
