"""The contract of every communicator: how the members of one generation merge values."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from phalanx.cluster.membership import Membership

Array = np.ndarray[Any, Any]


class ReduceOp(enum.Enum):
    """How values of several ranks become one."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class Handle(Protocol):
    """The result of an asynchronous collective, to be waited for."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> Any:
        """The collective's result, or its error."""
        ...


class Communicator(Protocol):
    """Collectives among the members of one generation.

    Every rank must call the same methods in the same order with equal shapes, dtypes and operation.
    If not, all ranks raise `CollectiveMismatchError`. A lost member raises `PeerLostError` on every
    survivor, a member that does not come within the timeout `CollectiveTimeoutError`. After any of these
    the communicator can only be closed.

    Arrays may be of any float (bfloat16 and float16 included), integer or boolean dtype, contiguous or not,
    0-d or empty; inputs are never modified. Reductions run in rank order, 16-bit floats are summed in
    float32, and the result has the same bits on every rank and in every run.
    """

    @property
    def membership(self) -> Membership: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Merge each array over all ranks; all of them travel as one.

        Args:
            arrays: equal in number, shapes and dtypes on all ranks.
            scale: factor on this rank's floating arrays before they are merged, one for all or one for
                each. It may differ between ranks. With scale 0 an array of any dtype counts as zeros, NaN
                included, and is not read. Only for SUM.
            out: contiguous arrays that receive the result. They may be the inputs themselves, each in its own
                place; otherwise they must not overlap them.

        Returns: the merged arrays: `out` if given, else fresh ones that the caller owns.
        """
        ...

    def broadcast(self, arrays: Sequence[Array], root: int = 0, *, out: Sequence[Array] | None = None) -> list[Array]:
        """The arrays of rank `root`, on every rank. Other ranks bring arrays of equal shape and dtype."""
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
            what: has been done before, for people; equal on all ranks.
            nbytes: how much this rank has given to the others before, in memory that all share (`shared_block`).
        """
        ...

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order; lengths may differ."""
        ...

    def broadcast_bytes(self, payload: bytes, root: int = 0) -> bytes:
        """Rank `root`'s payload on every rank; what the others pass is ignored."""
        ...

    def all_reduce_async(
        self,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> Handle:
        """As `all_reduce`, in the background. The arrays must stay unchanged until the handle is done."""
        ...

    def run_async(self, name: str, body: Callable[[], Any]) -> Handle:
        """Run a function in the background that may call several collectives of this communicator, in their turn."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent in collectives until now, those through shared memory included."""
        ...

    @property
    def bytes_on_links(self) -> int:
        """Those of `bytes_sent` that went over the network, packet headers included."""
        ...

    @property
    def collectives(self) -> int:
        """How many collectives this rank has begun."""
        ...

    def close(self) -> None:
        """Free what the communicator owns; safe to call twice. The membership's links stay open."""
        ...
