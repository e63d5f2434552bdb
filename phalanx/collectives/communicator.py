"""The contract of every communicator: how the members of one generation merge values.

`Array` is the only word of this contract that names where values live: host memory. Nothing else in it does, so that
collectives between devices can take arrays of their own kind.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from phalanx.cluster.membership import Membership
from phalanx.runtime.traffic_account import Traffic

Array = np.ndarray[Any, Any]


class ReduceOp(enum.Enum):
    """How the values of several ranks become one."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class Handle(Protocol):
    """The pending result of an asynchronous collective."""

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self, timeout_s: float | None = None) -> Any:
        """The collective's result.

        Raises:
            CollectiveTimeoutError: it is not done within `timeout_s`. It continues, and may be waited for again.
            Exception: the collective's own error.
        """
        ...


class Communicator(Protocol):
    """Collectives among the members of one generation.

    Every rank must call the same methods in the same order with equal shapes, dtypes and operation. If not, all ranks
    raise `CollectiveMismatchError`. If a member is lost, every survivor raises `PeerLostError`. If a member does not
    come within the timeout, the others raise `CollectiveTimeoutError`. After any of these the communicator can only be
    closed.

    Arrays may have any float (bfloat16 and float16 included), integer or boolean dtype. They may be non-contiguous, 0-d
    or empty. Inputs are never modified. Reductions run in the order of the ranks, not of their
    arrival; 16-bit floats are summed in float32. So the result has the same bits on every rank and in every run.
    """

    @property
    def membership(self) -> Membership: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def statistics(self) -> Traffic:
        """What this rank has done in collectives so far. May be read from any thread."""
        ...

    def all_reduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Merge each array over all ranks; all of them travel together.

        Args:
            arrays: equal in number, shapes and dtypes on all ranks.
            op: how to merge.
            scale: factor on this rank's floating arrays before they are merged: one for all, or one for each. It may
                differ between ranks. With scale 0 an array of any dtype counts as zeros, NaN included, and is not read.
                Only for SUM.
            out: contiguous arrays that receive the result. They may be the inputs themselves, in the same order;
                otherwise they must not overlap them.

        Returns: the merged arrays: `out` if given, else new ones that the caller owns.
        """
        ...

    def broadcast(self, arrays: Sequence[Array], root: int = 0, *, out: Sequence[Array] | None = None) -> list[Array]:
        """The arrays of rank `root`, on every rank. The other ranks pass arrays of equal shapes and dtypes."""
        ...

    def all_gather(self, array: Array) -> list[Array]:
        """Every rank's array, in rank order. The first dimensions may differ, all else must agree."""
        ...

    def reduce_scatter(self, array: Array, op: ReduceOp = ReduceOp.SUM) -> Array:
        """Merge arrays of shape (world_size, ...) over all ranks and return row `rank`."""
        ...

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        """Send `arrays[r]` to rank r; returns what each rank sent here. First dimensions may differ."""
        ...

    def barrier(self, what: str = "", nbytes: int = 0) -> None:
        """Return when every rank has called it.

        Args:
            what: what the ranks did before, for messages; equal on all ranks.
            nbytes: bytes that this rank has passed to the others before by means of its own, for the statistics.
        """
        ...

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order; lengths may differ."""
        ...

    def broadcast_bytes(self, payload: bytes, root: int = 0) -> bytes:
        """The payload of rank `root`, on every rank. The payloads of other ranks are ignored."""
        ...

    def run_async(self, name: str, body: Callable[[], Any]) -> Handle:
        """Run a function in the background, in its turn among the collectives of this rank. It may call several.

        All ranks must call this in the same order among their collectives. Blocking collectives wait for it.

        Args:
            name: what the function does, for messages.
            body: the function.
        """
        ...

    def close(self) -> None:
        """Free what the communicator owns; safe to call twice. The membership's links stay open."""
        ...
