"""`hvd.elastic.run`: repeats a function when the members change. Name and semantics are Horovod's.

When a member is lost, an operation raises `HorovodInternalError` on the others, which return to their last commit. When
members must join or leave, `commit` raises `HostsUpdatedInterrupt` on all members, and nothing is lost. In both cases
they form the next generation, rank 0 broadcasts its state, and the function is called again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.elastic.generation_loop import is_caused_by, run_until_complete
from phalanx.horovod import basics, instance_numbers
from phalanx.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from phalanx.horovod.elastic.object_state import State
from phalanx.horovod.horovod_job import current_job

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Repeat a function when the members change: `func(state, ...)`, with a `State`.

    In a job of fixed size (`phalanx run` without a range of workers), and in a single process, it is called once, after
    all ranks have received rank 0's state.

    A worker that joins later calls the function when its program reaches it. Its program must not request operations
    before that call, because the other members repeat only those of the function.

    Raises: the function's errors. Errors that would occur again, for example different shapes, end the job.
    """

    @functools.wraps(func)
    def repeated(state: State, *args: Any, **kwargs: Any) -> T:
        return run_until_complete(lambda: func(state, *args, **kwargs), _HorovodProgram(state))

    return repeated


class _HorovodProgram:
    """See `generation_loop.ElasticProgram`."""

    def __init__(self, state: State):
        self._state = state
        self._numbers = instance_numbers.snapshot()  # before the first call, with which a late member starts

    def synchronize(self, *, has_changed: bool) -> None:
        if has_changed:
            self._state.on_reset()
        self._state.sync()
        current_job().needs_state = False

    def recover(self, error: Exception) -> bool:
        job = current_job()
        if not isinstance(error, HostsUpdatedInterrupt):  # otherwise, the state was saved before the interrupt
            # Differing arguments also raise HorovodInternalError; without a loss, a retry would raise it again.
            if job.elastic is None or job.loss is None or not is_caused_by(error, HorovodInternalError):
                return False
            self._state.restore()
        basics.regroup()
        instance_numbers.restore(self._numbers)
        return True
