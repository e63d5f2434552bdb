"""Numbers in the names of collectives, for things that all ranks make in the same order: optimizers, layers.

In an elastic job a process that comes later makes, inside of the function of `hvd.elastic.run`, what the others have
made there in a former call. So the numbers that were given inside of that call are given again in the next one.
"""

from __future__ import annotations

from collections import Counter

_given: Counter[str] = Counter()


def next_number(kind: str) -> int:
    """How many things of this kind were made before."""
    number = _given[kind]
    _given[kind] += 1
    return number


def mark() -> dict[str, int]:
    """Where the counts stand now, for `return_to`."""
    return dict(_given)


def return_to(marked: dict[str, int]) -> None:
    """What was numbered since then counts no more."""
    _given.clear()
    _given.update(marked)
