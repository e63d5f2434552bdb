"""Horovod's functions of tensors, for any framework whose tensors can be made arrays and back.

PyTorch and TensorFlow have more to them (in-place forms, gradients, graphs) and modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.errors import ConfigurationError
from phalanx.horovod import operations
from phalanx.horovod.compression import Compression
from phalanx.horovod.operation_request import Array, HorovodOp
from phalanx.horovod.operations import Average, PendingResult, check_op
from phalanx.horovod.process_sets import ProcessSet, global_process_set

Tensor = Any


def check_kept(array: Array, dtype: str) -> None:
    """Integers that JAX cuts to 32 bits must fit there.

    Args:
        dtype: of the tensor that was made of the array.

    Raises: ConfigurationError if a value does not.
    """
    if array.dtype.kind not in "iu" or dtype == array.dtype.name or not array.size:
        return
    limits = np.iinfo(dtype)
    if array.max() > limits.max or array.min() < limits.min:
        raise ConfigurationError(
            f"A result of {array.dtype.name} has values that do not fit in {dtype}, which JAX makes of it. Call "
            f'jax.config.update("jax_enable_x64", True) at the start of the program, or pass NumPy arrays to the '
            f"functions of phalanx.horovod."
        )


class Interface:
    """The functions, as methods.

    Args:
        to_host: a tensor as an array, which is not written to.
        from_host: a fresh array as a tensor.
    """

    def __init__(self, to_host: Callable[[Tensor], Array], from_host: Callable[[Array], Tensor]):
        self._to_host = to_host
        self._from_host = from_host

    def allreduce_async(
        self,
        tensor: Tensor,
        average: bool | None = None,
        name: str | None = None,
        op: HorovodOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> PendingResult:
        """Start `allreduce`; the handle's result is a new tensor."""
        return _one(
            self.grouped_allreduce_async([tensor], average, name, op, prescale_factor, postscale_factor, process_set)
        )

    def grouped_allreduce_async(
        self,
        tensors: Sequence[Tensor],
        average: bool | None = None,
        name: str | None = None,
        op: HorovodOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        wake: bool = True,
    ) -> PendingResult:
        """Start `grouped_allreduce`; the handle's result is a list of new tensors."""
        pending = operations.allreduce(
            list(map(self._to_host, tensors)),
            name=name,
            op=check_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            wake=wake,
        )
        pending.finish = self._tensors
        return pending

    def allreduce(
        self,
        tensor: Tensor,
        average: bool | None = None,
        name: str | None = None,
        compression: Any = Compression.none,
        op: HorovodOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Tensor:
        """The tensor merged over the ranks (`operations.allreduce`); Average if `op` is not given."""
        return self.grouped_allreduce(
            [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
        )[0]

    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        average: bool | None = None,
        name: str | None = None,
        compression: Any = Compression.none,
        op: HorovodOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[Tensor]:
        """As `allreduce` of each; they travel as one."""
        packed = [compression.compress(self._to_host(tensor)) for tensor in tensors]
        pending = operations.allreduce(
            [np.asarray(array) for array, _ in packed],
            name=name,
            op=check_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            wake=False,
        )
        merged = zip(pending.wait(), packed, strict=True)
        return self._tensors([compression.decompress(array, ctx) for array, (_, ctx) in merged])

    def allgather_async(
        self, tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> PendingResult:
        """Start `allgather`; the handle's result is a new tensor."""
        return _one(self.grouped_allgather_async([tensor], name, process_set))

    def grouped_allgather_async(
        self, tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> PendingResult:
        """Start `grouped_allgather`; the handle's result is a list of new tensors."""
        pending = operations.allgather(list(map(self._to_host, tensors)), name=name, process_set=process_set)
        pending.finish = self._tensors
        return pending

    def allgather(
        self, tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Tensor:
        """The ranks' tensors joined along the first dimension, which may differ."""
        return self.grouped_allgather([tensor], name, process_set)[0]

    def grouped_allgather(
        self, tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[Tensor]:
        """As `allgather` of each; they begin together."""
        arrays = list(map(self._to_host, tensors))
        return self._tensors(operations.allgather(arrays, name=name, process_set=process_set, wake=False).wait())

    def broadcast_async(
        self,
        tensor: Tensor,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> PendingResult:
        """Start `broadcast`; the handle's result is a new tensor."""
        pending = operations.broadcast([self._to_host(tensor)], root_rank, name=name, process_set=process_set)
        pending.finish = self._tensors
        return _one(pending)

    def broadcast(
        self,
        tensor: Tensor,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Tensor:
        """The tensor of rank `root_rank`, on every rank."""
        arrays = [self._to_host(tensor)]
        pending = operations.broadcast(arrays, root_rank, name=name, process_set=process_set, wake=False)
        return self._tensors(pending.wait())[0]

    def alltoall_async(
        self,
        tensor: Tensor,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> PendingResult:
        """Start `alltoall`; the handle's result is what that returns."""
        counts = None if splits is None else np.asarray(splits)
        pending = operations.alltoall(self._to_host(tensor), counts, name=name, process_set=process_set)

        def finish(result: tuple[Array, list[int]]) -> Any:
            received = self._from_host(result[0])
            return received if splits is None else (received, self._from_host(np.asarray(result[1], np.int32)))

        pending.finish = finish
        return pending

    def alltoall(
        self,
        tensor: Tensor,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """The rows that all ranks sent here, joined; with `splits`, also how many came from each (int32).

        Args:
            splits: how many rows go to each rank, zeros included; None: equal parts.
        """
        return self.alltoall_async(tensor, splits, name, process_set).wait()

    def reducescatter_async(
        self,
        tensor: Tensor,
        name: str | None = None,
        op: HorovodOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> PendingResult:
        """Start `reducescatter`; the handle's result is a new tensor."""
        return _one(
            self.grouped_reducescatter_async([tensor], name, op, prescale_factor, postscale_factor, process_set)
        )

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[Tensor],
        name: str | None = None,
        op: HorovodOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> PendingResult:
        """Start `grouped_reducescatter`; the handle's result is a list of new tensors."""
        pending = operations.reducescatter(
            list(map(self._to_host, tensors)),
            name=name,
            op=check_op(op),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        pending.finish = self._tensors
        return pending

    def reducescatter(
        self,
        tensor: Tensor,
        name: str | None = None,
        op: HorovodOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Tensor:
        """This rank's rows of the tensor merged over the ranks."""
        return self.reducescatter_async(tensor, name, op, prescale_factor, postscale_factor, process_set).wait()

    def grouped_reducescatter(
        self,
        tensors: Sequence[Tensor],
        name: str | None = None,
        op: HorovodOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[Tensor]:
        """As `reducescatter` of each; they begin together."""
        result: list[Tensor] = self.grouped_reducescatter_async(
            tensors, name, op, prescale_factor, postscale_factor, process_set
        ).wait()
        return result

    def _tensors(self, arrays: Sequence[Array]) -> list[Tensor]:
        return list(map(self._from_host, arrays))


def synchronize(handle: PendingResult) -> Any:
    """The result of an operation; waits until it is there. Raises HorovodInternalError if it failed."""
    return handle.wait()


def poll(handle: PendingResult) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.done()


def _one(pending: PendingResult) -> PendingResult:
    """A group's operation of one tensor, whose result is that tensor."""
    finish = pending.finish
    assert finish is not None
    pending.finish = lambda results: finish(results)[0]
    return pending
