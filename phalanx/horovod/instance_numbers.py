"""Numbers in the names of collectives, for things that all members of a process set use: optimizers, layers.

A thing takes its number when it first communicates, so that one which a single rank makes and never uses, as a copy of
the model for a checkpoint, is in nobody's way.

In an elastic job it takes its number when it is made, since a process that comes later makes, in the same order, what
the others have made, but need not come to use it. What they have made inside of the function of `hvd.elastic.run`, in a
former call, it makes in its first one: so the numbers that were given inside of that call are given again in the next.
"""

from __future__ import annotations

import weakref
from collections import Counter

from phalanx.horovod.horovod_job import current, is_joined
from phalanx.horovod.process_sets import ProcessSet

_given: Counter[tuple[str, int | None]] = Counter()
_early: list[weakref.ref[InstanceNumber]] = []
"""What was made before the job was met, when nobody could say whether it is elastic."""


class InstanceNumber:
    """How many things of this kind have come before this one in the process set."""

    def __init__(self, kind: str, process_set: ProcessSet):
        self._kind = kind
        self._process_set = process_set
        self._value: int | None = None
        if not is_joined():
            _early.append(weakref.ref(self))
        elif current().elastic is not None:
            int(self)

    def __int__(self) -> int:
        if self._value is None:
            key = self._kind, self._process_set.process_set_id
            self._value = _given[key]
            _given[key] += 1
        return self._value


def mark() -> dict[tuple[str, int | None], int]:
    """Where the counts stand now, for `return_to`."""
    if current().elastic is not None:
        for number in [made for reference in _early if (made := reference()) is not None]:
            int(number)
    _early.clear()
    return dict(_given)


def return_to(marked: dict[tuple[str, int | None], int]) -> None:
    """What was numbered since then counts no more."""
    _given.clear()
    _given.update(marked)
