"""`hvd.elastic.run`: a function that goes on over changes of the members. Name and meaning are Horovod's.

When a member is lost, a collective raises `HorovodInternalError` on the others; they go back to their last commit. When
members are to join or to leave, `commit` raises `HostsUpdatedInterrupt` on all of them, and nothing is lost. In either
case they meet the new members, rank 0 gives all of them its state, and the function is called again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.errors import PeerLostError
from phalanx.horovod import basics, instance_numbers
from phalanx.horovod.elastic.state import State
from phalanx.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from phalanx.horovod.horovod_job import HorovodJob, current

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Let a function go on over changes of the members: `func(state, ...)`, with a `State`.

    In a job of fixed members (`phalanx run` without a range of workers), and alone, it is called once, after all have
    been given rank 0's state.

    A member that comes later calls it when it has come to it in the script. So there must be no collectives before it
    which the others do not call again, apart from those of the function itself.

    Raises: what the function raises; errors that would come again, as when ranks bring different shapes, end the job.
    """

    @functools.wraps(func)
    def repeated(state: State, *args: Any, **kwargs: Any) -> T:
        marked = instance_numbers.mark()
        has_changed = False
        while True:
            world = current()
            try:
                if has_changed:
                    state.on_reset()
                _begin(state, world)
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                pass  # it has been kept
            except Exception as error:
                if world.elastic is None or world.lost is None or not _tells_of_it(error):
                    raise
                state.restore()
            basics.regroup()
            instance_numbers.return_to(marked)
            has_changed = True

    return repeated


def _begin(state: State, world: HorovodJob) -> None:
    if world.everybody_is_fresh:
        raise PeerLostError("All members that had the state of the job were lost.", rank=0, task="chief", host="")
    state.sync()
    world.fresh = False


def _tells_of_it(error: BaseException) -> bool:
    """Whether a collective raised this; TensorFlow wraps what is raised inside of its functions."""
    return isinstance(error, HorovodInternalError) or HorovodInternalError.__name__ in str(error)
