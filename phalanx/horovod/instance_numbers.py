"""Numbers optimizers and layers, so that their collectives have the same names on all members of a process set.

An instance gets its number when it first communicates. So an instance that only one rank creates and never uses, such
as a copy of the model for a checkpoint, does not shift the numbers of others.

In an elastic job, an instance gets its number when it is created: a process that joins later creates the same instances
in the same order, but may not use all of them. In its first call of the function of `hvd.elastic.run`, it creates what
the others created in an earlier call. So numbers assigned during one call are reused in the next.
"""

from __future__ import annotations

import weakref
from collections import Counter

from phalanx.horovod.common.process_sets import ProcessSet
from phalanx.horovod.horovod_job import current_job, is_joined

_assigned: Counter[tuple[str, int | None]] = Counter()  # numbers assigned so far, by kind and process set
_created_before_join: list[weakref.ref[InstanceNumber]] = []
"""Instances created before joining the job, when it was unknown whether the job is elastic."""


class InstanceNumber:
    """The number of an instance among the instances of its kind and process set: `int(number)`."""

    def __init__(self, kind: str, process_set: ProcessSet):
        self._kind = kind
        self._process_set = process_set
        self._value: int | None = None
        if not is_joined():
            # A weak reference: in a job of fixed size, this list is never read.
            _created_before_join.append(weakref.ref(self))
        elif current_job().elastic is not None:
            int(self)

    @property
    def name(self) -> str:
        """Name of the instance: its kind and number."""
        return f"{self._kind}.{int(self)}"

    def __int__(self) -> int:
        if self._value is None:
            key = self._kind, self._process_set.process_set_id
            self._value = _assigned[key]
            _assigned[key] += 1
        return self._value


def snapshot() -> dict[tuple[str, int | None], int]:
    """Return the current counts, for `restore`."""
    if current_job().elastic is not None:
        # In the order of creation, like later instances.
        for number in [number for reference in _created_before_join if (number := reference()) is not None]:
            int(number)
    _created_before_join.clear()
    return dict(_assigned)


def restore(counts: dict[tuple[str, int | None], int]) -> None:
    """Restore the counts of `snapshot`, to reuse the numbers assigned since."""
    _assigned.clear()
    _assigned.update(counts)
