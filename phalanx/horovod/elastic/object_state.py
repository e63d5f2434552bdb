"""The state of an elastic program, equal on all members. Names, arguments and semantics are Horovod's.

A commit is atomic: it first does everything that needs the other members, and only then saves anything. So the loss of
a member during a commit cannot leave a mixture of two states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.horovod import basics, operations
from phalanx.horovod.common.exceptions import HostsUpdatedInterrupt
from phalanx.horovod.horovod_job import current_job
from phalanx.horovod.object_collectives import broadcast_object
from phalanx.horovod.operation_request import OperationKind
from phalanx.horovod.operations import Max


class State:
    """State that `hvd.elastic.run` can save, restore and send to members that join later.

    Subclasses implement `save`, `restore` and `sync`.

    Args:
        bcast_object: Function that broadcasts an object from rank 0 to all members.
        get_rank: Function that returns this process's rank.
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
        """Register functions to call after each change of the members, before they receive the state: for example, to
        scale the learning rate, add process sets or partition the data."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Handle a change of the members; rank and size are already the new ones."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the current state, then check whether the members must change; all members must call this.

        Raises: HostsUpdatedInterrupt on all members if they must.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether members must join or leave, and if so, save the current state; all members must call this.

        Raises: HostsUpdatedInterrupt on all members if so.
        """
        node = current_job().elastic
        if node is None:
            return
        # The request reaches members at different times: when one has it, all act on it after the same commit.
        wanted = np.array([node.is_regroup_requested], np.uint8)
        (merged,) = operations.run(OperationKind.ALLREDUCE, [wanted], op=Max, name="elastic.check_host_updates")
        if merged[0]:
            self.save()
            raise HostsUpdatedInterrupt()

    def save(self) -> None:
        """Save the current state; all members must call this."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send rank 0's state to all members, and save it; all members must call this."""
        raise NotImplementedError

    def reset(self) -> None:
        """Rebuild everything that depends on rank and size, after the members have changed."""


class ObjectState(State):
    """Python objects, each an attribute of this state.

    `save` copies them. Members that join later receive them as pickles, which requires a job with a secret
    (`phalanx run` creates one).

    Args:
        bcast_object: Function that broadcasts an object from rank 0 to all members.
        get_rank: Function that returns this process's rank.
        kwargs: The objects, by name.

    Examples:
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
