"""The collectives on NumPy arrays: what the interfaces of all frameworks are made of.

Each starts an operation and returns a `PendingResult`, whose `wait` gives the result. Several arrays in one call are a
group: they begin together and travel as one. Arrays belong to the operation until it is done.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.collectives.communicator import ReduceOp
from phalanx.collectives.reduction import check_reducible
from phalanx.errors import ConfigurationError
from phalanx.horovod import adasum
from phalanx.horovod.controller import Controller, OperationHandle
from phalanx.horovod.execution import FusedPart
from phalanx.horovod.operation_request import VARYING, Array, HorovodOp, OperationKind, Request, name_of
from phalanx.horovod.process_sets import ProcessSet, global_process_set

Average, Sum, Adasum, Min, Max, Product = (
    HorovodOp.AVERAGE,
    HorovodOp.SUM,
    HorovodOp.ADASUM,
    HorovodOp.MIN,
    HorovodOp.MAX,
    HorovodOp.PRODUCT,
)

AUTOMATIC_NAMES = 64
"""Operations without a name are named by their number; the names are used again, so that they become known."""


class PendingResult:
    """An operation that has been started.

    Attributes:
        finish: what makes of the result what the caller wants; called once, by the thread that waits.
    """

    __slots__ = ("_controller", "_finished", "_handle", "_result", "finish")

    def __init__(self, controller: Controller, handle: OperationHandle, finish: Callable[[Any], Any] | None = None):
        self._controller = controller
        self._handle = handle
        self._finished = False
        self._result: Any = None
        self.finish = finish

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._controller.poll(self._handle)

    def wait(self) -> Any:
        """The result. Raises HorovodInternalError if the operation failed."""
        if not self._finished:
            self._controller.wait(self._handle)
            result = self._handle.part.result
            self._result = result if self.finish is None else self.finish(result)
            self._finished = True
        return self._result


def check_op(op: HorovodOp | None, average: bool | None = None, *, default: HorovodOp = Average) -> HorovodOp:
    """The reduction that `op`, or Horovod's old argument `average`, names."""
    if average is not None:
        if not isinstance(average, (bool, int, np.bool_)):
            raise ValueError(f"average is {average!r}; it must be True or False. Pass a name as name=...")
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return Average if average else Sum
    if op is None:
        return default
    if not isinstance(op, HorovodOp):
        raise ValueError(f"op is {op!r}; it must be one of hvd.{', hvd.'.join(each.value for each in HorovodOp)}.")
    return op


def allreduce(
    arrays: Sequence[Array],
    *,
    name: str | None = None,
    op: HorovodOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    outs: Sequence[Array] | None = None,
    wake: bool = True,
    detail: str = "",
) -> PendingResult:
    """Start to merge each array over the ranks; the result is a list of arrays.

    Args:
        arrays: equal in number, shapes and dtypes on all ranks.
        name: tells operations that run at the same time apart, and must be the same on all ranks. None: the n-th
            operation without a name of a kind belongs to every other rank's n-th.
        op: how to merge. Averages of integers are cut off.
        prescale_factor: multiplies before; `postscale_factor` after. Integers are cut off after each.
        outs: contiguous arrays that receive the result, perhaps `arrays` themselves.
        wake: False if the caller waits at once.
        detail: anything else that must be equal on all ranks, for example what the values mean.

    Raises:
        ConfigurationError: the arrays cannot be merged so.
        HorovodInternalError: from `wait`, if the ranks differ.
    """
    controller = process_set.controller
    for array in arrays:
        _check_reducible(array, op)
    _check_factors(prescale_factor, postscale_factor)
    if op is Adasum:
        adasum.check([array.dtype for array in arrays], controller.communicator.world_size)
    request = Request(
        _name(controller, OperationKind.ALLREDUCE, name),
        OperationKind.ALLREDUCE.value,
        tuple([name_of(array.dtype) for array in arrays]),
        tuple([array.shape for array in arrays]),
        op.value,
        0,
        float(prescale_factor),
        float(postscale_factor),
        detail,
    )
    return _start(controller, request, FusedPart(arrays, outs), name, wake)


def allgather(
    arrays: Sequence[Array],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    wake: bool = True,
) -> PendingResult:
    """Start to join each array over the ranks, one after the other along the first dimension, which may differ.

    Raises: as `allreduce`.
    """
    controller = process_set.controller
    for array in arrays:
        _check_rows(array, "allgather")
    request = _request(controller, OperationKind.ALLGATHER, name, arrays, varying=True)
    return _start(controller, request, FusedPart(arrays), name, wake)


def broadcast(
    arrays: Sequence[Array],
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    outs: Sequence[Array] | None = None,
    wake: bool = True,
) -> PendingResult:
    """Start to send the arrays of one rank to all; the result is a list of arrays.

    Args:
        root_rank: a rank of the job, and a member of the process set.

    Raises: as `allreduce`.
    """
    controller = process_set.controller
    root = process_set.position(int(root_rank), "root_rank")
    for array in arrays:
        _check_plain(array, "broadcast")
    request = _request(controller, OperationKind.BROADCAST, name, arrays, root=root)
    return _start(controller, request, FusedPart(arrays, outs), name, wake)


def alltoall(
    array: Array,
    splits: Sequence[int] | Array | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    wake: bool = True,
) -> PendingResult:
    """Start to send a part of the array to each rank; the result is what they sent here, and how much each.

    Args:
        splits: how many rows go to each rank, 0 included; None: equal parts.

    Raises: as `allreduce`.
    """
    controller = process_set.controller
    _check_rows(array, "alltoall")
    ranks = controller.communicator.world_size
    if splits is None:
        if len(array) % ranks:
            raise ConfigurationError(
                f"alltoall without splits sends equal parts; {len(array)} rows cannot be cut in {ranks}. Pass splits."
            )
        counts = [len(array) // ranks] * ranks
    else:
        try:
            counts = [operator.index(count) for count in splits]
        except TypeError as error:
            raise ConfigurationError(f"alltoall got splits {list(splits)}: numbers of rows are integers.") from error
        if len(counts) != ranks or min(counts) < 0 or sum(counts) != len(array):
            raise ConfigurationError(
                f"alltoall got splits {counts} for {len(array)} rows and {ranks} ranks: they must be one number "
                f"of rows for each rank, at least 0, and their sum the number of rows."
            )
    request = _request(controller, OperationKind.ALLTOALL, name, [array], varying=True)
    return _start(controller, request, FusedPart([array], splits=counts), name, wake)


def reducescatter(
    arrays: Sequence[Array],
    *,
    name: str | None = None,
    op: HorovodOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    wake: bool = True,
) -> PendingResult:
    """Start to merge each array over the ranks and give each rank a part of its rows; the result is a list.

    The parts are as equal as can be; where the rows cannot be divided, the first ranks get one more.

    Raises: as `allreduce`.
    """
    controller = process_set.controller
    if op not in (Average, Sum, Min, Max, Product):
        raise ConfigurationError(f"reducescatter cannot merge by {op}. Use Average, Sum, Min, Max or Product.")
    for array in arrays:
        _check_rows(array, "reducescatter")
        _check_reducible(array, op)
    _check_factors(prescale_factor, postscale_factor)
    request = Request(
        _name(controller, OperationKind.REDUCESCATTER, name),
        OperationKind.REDUCESCATTER.value,
        tuple(name_of(array.dtype) for array in arrays),
        tuple(array.shape for array in arrays),
        op.value,
        0,
        float(prescale_factor),
        float(postscale_factor),
    )
    return _start(controller, request, FusedPart(arrays), name, wake)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all members have called it."""
    controller = process_set.controller
    request = _request(controller, OperationKind.BARRIER, None, [])
    _start(controller, request, FusedPart(()), None, False).wait()


def join() -> int:
    """This rank has run out of data: until all ranks have called it, it counts as zeros in the others' sums and
    averages, and not at all in their Min, Max and Product.

    Averages are still formed over all ranks. Meanwhile the others can use allreduce and barrier; anything else raises.

    Returns: the rank that was the last to call.
    """
    return global_process_set.controller.join()


# --------------------------------------------------------------------------------------------------------------------


def _name(controller: Controller, kind: OperationKind, given: str | None) -> str:
    if given is not None and not isinstance(given, str):
        raise ConfigurationError(f"{kind.value} got the name {given!r}; a name is a string.")
    try:
        (given or "").encode()
    except UnicodeEncodeError as error:  # half a character, which could not be sent
        raise ConfigurationError(f"{kind.value} got the name {given!r}, which cannot be printed.") from error
    if given:
        return given
    names = controller.automatic_names
    return f"{kind.value}.noname.{next(names.setdefault(kind.value, itertools.count())) % AUTOMATIC_NAMES}"


def _request(
    controller: Controller,
    kind: OperationKind,
    name: str | None,
    arrays: Sequence[Array],
    *,
    varying: bool = False,
    root: int = 0,
) -> Request:
    shapes = [(VARYING, *array.shape[1:]) if varying else array.shape for array in arrays]
    return Request(
        _name(controller, kind, name),
        kind.value,
        tuple(name_of(array.dtype) for array in arrays),
        tuple(shapes),
        root=root,
    )


def _start(controller: Controller, request: Request, part: FusedPart, name: str | None, wake: bool) -> PendingResult:
    return PendingResult(controller, controller.submit(request, part, wake=wake, queue=name is None))


def _check_reducible(array: Array, op: HorovodOp) -> None:
    check_reducible(array.dtype, ReduceOp.SUM)
    if op is Average and array.dtype == np.bool_:
        raise ConfigurationError("the average of booleans is no boolean. Use Min, Max or Sum (any), or cast them.")


def _check_factors(*factors: float) -> None:
    if not all(map(math.isfinite, factors)):
        raise ConfigurationError(f"prescale_factor and postscale_factor are {factors}: both must be finite.")


def _check_plain(array: Array, what: str) -> None:
    if array.dtype.hasobject:
        raise ConfigurationError(f"{what} got an array of Python objects. Use {what}_object, or an array of numbers.")
    if issubclass(array.dtype.type, np.flexible):
        raise ConfigurationError(
            f"{what} got an array of {array.dtype}: strings and records have a size of their own on each rank. Use "
            f"{what}_object, or an array of numbers."
        )


def _check_rows(array: Array, what: str) -> None:
    _check_plain(array, what)
    if not array.ndim:
        raise ConfigurationError(f"{what} works on rows, and this array is a single number (0 dimensions).")
