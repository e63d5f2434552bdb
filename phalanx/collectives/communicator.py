"""The contract of every communicator: how the members of one generation merge values.

Only `Array` ties this contract to host memory, so that collectives between devices can use their own kind of array.
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
    """How to combine the values of several ranks."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class Handle(Protocol):
    """Pending result of an asynchronous collective."""

    def done(self) -> bool:
        """Whether `wait` returns immediately."""
        ...

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the result of the collective, and return it.

        Raises:
            CollectiveTimeoutError: Not done within `timeout_s`. The collective continues; `wait` may be called again.
            Exception: The error of the collective.
        """
        ...


class Communicator(Protocol):
    """Collectives among the members of one generation.

    Every rank must call the same methods in the same order with equal shapes, dtypes and operation. If not, all ranks
    raise `CollectiveMismatchError`. If a member is lost, every survivor raises `PeerLostError`. If a member does not
    arrive within the timeout, the others raise `CollectiveTimeoutError`. After any of these errors, the communicator
    can only be closed.

    Arrays may have any float (bfloat16 and float16 included), integer or boolean dtype. They may be non-contiguous, 0-d
    or empty. Inputs are never modified. Reductions run in rank order, not in order of
    arrival, and sum 16-bit floats in float32. The result therefore has the same bits on every rank and in every run.
    """

    @property
    def membership(self) -> Membership: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def statistics(self) -> Traffic:
        """Statistics of this rank's collectives so far. May be read from any thread."""
        ...

    def all_reduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Merge each array over all ranks. All arrays are sent together.

        Args:
            arrays: Arrays of equal number, shapes and dtypes on all ranks.
            op: How to merge.
            scale: Factor for this rank's floating-point arrays before the merge: one for all arrays, or one per array.
                May differ between ranks. With scale 0, an array of any dtype is not read and counts as zeros, even if
                it contains NaN. Only for SUM.
            out: Contiguous arrays that receive the result. They may be the inputs themselves, in the same order;
                otherwise, they must not overlap the inputs.

        Returns: The merged arrays: `out` if given, else new arrays that the caller owns.
        """
        ...

    def broadcast(self, arrays: Sequence[Array], root: int = 0, *, out: Sequence[Array] | None = None) -> list[Array]:
        """Return the arrays of rank `root` on every rank. The other ranks pass arrays of equal shapes and dtypes."""
        ...

    def all_gather(self, array: Array) -> list[Array]:
        """Return every rank's array, in rank order. Only the first dimensions may differ."""
        ...

    def reduce_scatter(self, array: Array, op: ReduceOp = ReduceOp.SUM) -> Array:
        """Merge arrays of shape (world_size, ...) over all ranks and return row `rank`."""
        ...

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        """Send `arrays[r]` to rank r, and return what each rank sent here. First dimensions may differ."""
        ...

    def barrier(self, what: str = "", nbytes: int = 0) -> None:
        """Return when every rank has called it.

        Args:
            what: Preceding work of the ranks, for messages; equal on all ranks.
            nbytes: Bytes that this rank has already sent to the others by other means, for the statistics.
        """
        ...

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in rank order. Lengths may differ."""
        ...

    def broadcast_bytes(self, payload: bytes, root: int = 0) -> bytes:
        """Return the payload of rank `root` on every rank. The payloads of other ranks are ignored."""
        ...

    def run_async(self, name: str, body: Callable[[], Any]) -> Handle:
        """Run a function in the background, in order with this rank's collectives. It may call several collectives.

        All ranks must call this at the same position among their collectives. Blocking collectives wait for it.

        Args:
            name: What the function does, for messages.
            body: Function to run.
        """
        ...

    def close(self) -> None:
        """Free the resources of the communicator; safe to call twice. The membership's links stay open."""
        ...
