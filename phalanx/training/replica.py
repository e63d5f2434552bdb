"""This process's place in the job, as training needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from phalanx.collectives.communicator import Array, Communicator, ReduceOp
from phalanx.collectives.cross_device_ops import CrossDeviceOps


@dataclass
class Replica:
    """One replica of the model: a rank and the communicator that joins it to the others.

    Attributes:
        communicator: of the job's present generation; replaced when the membership changes.
        cross_device_ops: how gradients are merged, where the user chose it.
    """

    communicator: Communicator
    cross_device_ops: CrossDeviceOps | None = None

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def all_reduce(
        self,
        arrays: Sequence[Array],
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """The sum over ranks, by the algorithm that the user chose or the communicator's own."""
        if self.cross_device_ops is None:
            return self.communicator.all_reduce(arrays, scale=scale, out=out)
        return self.cross_device_ops.all_reduce(self.communicator, arrays, scale=scale, out=out)

    # Decisions that all ranks must take alike.

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on at least one."""
        merged = self.communicator.all_reduce([np.array([flag], np.uint8)], ReduceOp.MAX)
        return bool(merged[0][0])

    def from_chief(self, value: object) -> object:
        """The chief's value (of JSON's types), on every rank."""
        return msgspec.msgpack.decode(self.communicator.broadcast_bytes(msgspec.msgpack.encode(value)))

    def gather(self, value: int) -> list[int]:
        """Every rank's number, in rank order."""
        return [int(array[0]) for array in self.communicator.all_gather(np.array([value], np.int64))]
