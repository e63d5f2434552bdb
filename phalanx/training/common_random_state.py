"""The backend's random state around a call of a model's method (`engines.random_state`).

Inside, each replica draws numbers of its own, as its dropout masks must differ from those of the others. After it, all
go on from the same state, so that what the program draws next (`torch.randn`, `random_split`) is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from phalanx.engines.random_state import differ, draw_next_numbers, draw_own_numbers, random_state, set_random_state
from phalanx.training.replica import Replica
from phalanx.transport.serialization import decode, encode

State = list[np.ndarray[Any, Any]]


@contextmanager
def common_afterwards(replica: Replica, method: str) -> Iterator[None]:
    """Around a call that all replicas make; without effect where the backend keeps no such state.

    Args:
        method: of the model, by name.
    """
    before = random_state()
    if replica.is_alone or replica.micro_batches or not before:
        yield
    elif method.endswith("_on_batch"):
        with _of_a_batch(before, replica.rank):
            yield
    else:
        try:
            yield
        except BaseException:
            set_random_state([before], 0)
            raise
        if not replica.is_candidate:  # which has not taken part
            set_random_state([replica.retry(lambda: _next(before, replica))], 0)


def _next(before: State, replica: Replica) -> State:
    """The chief's state, because it alone draws the order of a `DataLoader`; all ranks must call.

    A rank to which the program has given another state before keeps that, as a custom training loop does for dropout.
    In an elastic job it may be a rank that has joined since, and takes the chief's.
    """
    chiefs_before, chiefs = decode(replica.communicator.broadcast_bytes(encode([before, random_state()])))
    return before if replica.elastic is None and differ(before, chiefs_before) else chiefs


@contextmanager
def _of_a_batch(before: State, rank: int) -> Iterator[None]:
    """Without a collective, which would take long next to one batch: layers have drawn numbers on all ranks, or on
    none."""
    draw_own_numbers(before, rank)
    own = random_state()
    try:
        yield
    finally:
        is_drawn = differ(own, random_state())
        set_random_state([before], 0)
        if is_drawn:
            draw_next_numbers(before)
