"""What the members of an elastic job must have the same of. Names, arguments and meaning are Horovod's.

A commit is whole: what needs the other members comes first, and only then is anything kept. So a member that is lost in
the middle of a commit leaves no mixture of two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.horovod import basics, operations
from phalanx.horovod.exceptions import HostsUpdatedInterrupt
from phalanx.horovod.horovod_job import current
from phalanx.horovod.object_collectives import broadcast_object
from phalanx.horovod.operations import Max


class State:
    """What can be kept, taken back, and given to members that come later; `hvd.elastic.run` uses it.

    A class of one's own says how: `save`, `restore` and `sync`.

    Args:
        bcast_object: gives all members rank 0's object.
        get_rank: this process's rank.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = basics.rank,
    ):
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Functions to be called after each change of the members, before they are given the state: to scale the
        learning rate, to add process sets, to cut the data anew."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The members have changed; rank and size are the new ones."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep what there is now, then look whether the members are to change; all members must call.

        Raises: HostsUpdatedInterrupt on all of them if so.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Look whether members are to join or to leave; all members must call. What there is now is kept then.

        Raises: HostsUpdatedInterrupt on all of them if so.
        """
        node = current().elastic
        if node is None:
            return
        wanted = np.array([node.asked_to_regroup], np.uint8)
        (merged,) = operations.allreduce([wanted], op=Max, name="elastic.check_host_updates", wake=False).wait()
        if merged[0]:
            self.save()
            raise HostsUpdatedInterrupt()

    def save(self) -> None:
        """Keep what there is now; all members must call."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all members what rank 0 has now, and keep it; all members must call."""
        raise NotImplementedError

    def reset(self) -> None:
        """The members have changed: what depends on rank and size is to be made anew."""


class ObjectState(State):
    """Python objects, each an attribute of this state.

    They are copied when they are kept. To members that come later they travel as pickles, which needs a job with a
    secret (`phalanx run` makes one).

    Args:
        bcast_object: gives all members rank 0's object.
        get_rank: this process's rank.
        kwargs: the objects, by name.

    Example:
        >>> state = ObjectState(step=0)
        >>> state.step += 1
        >>> state.save()
        >>> state.step = 7
        >>> state.restore()
        >>> state.step
        1
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = basics.rank,
        **kwargs: Any,
    ):
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        vars(self).update(kwargs)

    def save(self) -> None:
        """See `State.save`."""
        self._saved_state = copy.deepcopy(self._present())

    def restore(self) -> None:
        """See `State.restore`."""
        vars(self).update(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """See `State.sync`."""
        if self._saved_state:
            vars(self).update(self._bcast_object(self._present()))
            ObjectState.save(self)

    def _present(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}
