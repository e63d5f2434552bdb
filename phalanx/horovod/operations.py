"""The collectives on NumPy arrays, one table row each.

A row (`CollectiveSpec`) defines which arrays a collective takes, what all ranks must agree on, and its gradient.
`start` starts any collective and returns a `PendingResult`; `run` waits for the result. Several arrays in one call form
a group: they start and travel together. The arrays belong to the operation until it is done. The functions of all
frameworks are built on these two (`framework_bindings`).

Gradients are defined as in Horovod 0.28 for TensorFlow and PyTorch. The gradients of allreduce and alltoall are the
adjoint operations, which is correct for a loss that is the sum of the ranks' losses. The gradients of allgather and
broadcast are the adjoint divided by the number of ranks, which is correct for the mean of the ranks' losses. The
gradient of reducescatter is the adjoint multiplied by the number of ranks, which is correct for neither. Programs rely
on these conventions.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from phalanx.collectives.communicator import ReduceOp
from phalanx.collectives.reduction import check_reducible
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.horovod import adasum
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.controller import Controller, OperationHandle
from phalanx.horovod.execution import OperationBuffers
from phalanx.horovod.operation_request import VARYING, Array, HorovodOp, OperationKind, Request, dtype_name

Average = HorovodOp.AVERAGE
"""The mean over the ranks; means of integers are truncated."""
Sum = HorovodOp.SUM
"""The sum over the ranks."""
Adasum = HorovodOp.ADASUM
"""The adaptive sum over the ranks, for allreduces. Source: Maleki et al. 2020, "Scaling Distributed Training with
Adaptive Summation"."""
Min = HorovodOp.MIN
"""The minimum over the ranks."""
Max = HorovodOp.MAX
"""The maximum over the ranks."""
Product = HorovodOp.PRODUCT
"""The product over the ranks."""

AUTOMATIC_NAMES = 64
"""Modulus of the numbers that name unnamed operations, so that names repeat and are cached."""


class Arguments(msgspec.Struct, frozen=True):
    """The arguments of a collective, without its arrays. Each collective uses some of them.

    Attributes:
        name: Identifier among concurrent operations; equal on all ranks. Without a name, the n-th unnamed operation of
            a kind on one rank matches the n-th one on every other rank.
        process_set: The ranks that take part.
        op: The reduction. Averages of integers are truncated.
        prescale_factor: Factor that multiplies the input; integers are truncated.
        postscale_factor: Factor that multiplies the result; integers are truncated.
        root_rank: The source of a broadcast: a rank of the job that is a member of the process set.
        splits: Number of rows that an alltoall sends to each rank; None or empty for equal parts.
        detail: Anything else that must be equal on all ranks, as text.
    """

    name: str | None = None
    process_set: ProcessSet = global_process_set
    op: HorovodOp = Average
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    root_rank: int = 0
    splits: Any = None
    detail: str = ""

    def for_gradient(self) -> Arguments:
        """Return the arguments of the operation that computes the gradient."""
        return msgspec.structs.replace(self, name=f"{self.name}.gradient" if self.name else None, splits=None)


class PendingResult:
    """The handle of a started operation.

    Attributes:
        finish: Function that converts the result for the caller; called once, by the thread that waits.
    """

    __slots__ = ("_controller", "_finished", "_handle", "_result", "finish")

    def __init__(self, controller: Controller, handle: OperationHandle):
        self._controller = controller
        self._handle = handle
        self._finished = False
        self._result: Any = None
        self.finish: Callable[[Any], Any] | None = None

    def done(self) -> bool:
        """Whether `wait` would return immediately."""
        return self._handle.done

    def wait(self) -> Any:
        """Wait for the result and return it. Raises HorovodInternalError if the operation failed."""
        if not self._finished:
            self._controller.wait(self._handle)
            result = self._handle.buffers.result
            self._result = result if self.finish is None else self.finish(result)
            self._finished = True
        return self._result

    __call__ = wait  # programs call the handle of Horovod's `sparse_allreduce_async` to get its result


class CollectiveSpec(NamedTuple):
    """A collective: one row of the table.

    Attributes:
        check: Function of kind, arrays, arguments and number of ranks; raises ConfigurationError for invalid arguments.
        gradient: Function that computes the gradients of the inputs from the gradients of the results, the arguments,
            and `rows` (see `gradient` below).
        is_reduction: Whether ranks must agree on `op` and the factors.
        allows_uneven_rows: Whether the arrays of two ranks may have different numbers of rows.
        changes_row_count: Whether the result can have another number of rows than the input.
    """

    check: Callable[[OperationKind, Sequence[Array], Arguments, int], None]
    gradient: Callable[[Sequence[Array], Arguments, Sequence[int]], list[Array]]
    is_reduction: bool = False
    allows_uneven_rows: bool = False
    changes_row_count: bool = False


def start(
    kind: OperationKind,
    arrays: Sequence[Array],
    arguments: Arguments,
    *,
    outs: Sequence[Array] | None = None,
    wake: bool = True,
) -> PendingResult:
    """Start a collective; the result is a list of arrays.

    An alltoall takes one array. Its result is the received rows and the number of rows from each rank (int32).

    Args:
        kind: The collective.
        arrays: Arrays, equal on all ranks in number, dtypes and shapes (except for rows, if the collective allows it).
        arguments: Arguments that are equal on all ranks, except `splits`.
        outs: Contiguous arrays that receive the result, possibly `arrays` themselves; None for new arrays.
        wake: Whether to wake the background thread; False if the caller waits immediately, which is faster.

    Raises:
        ConfigurationError: the arguments are invalid on this rank.
        HorovodInternalError: from `wait`, if the arguments differ between ranks or communication failed.
    """
    spec, controller = _COLLECTIVES[kind], arguments.process_set.controller
    ranks = controller.communicator.world_size
    spec.check(kind, arrays, arguments, ranks)
    root, splits = 0, None
    if kind is OperationKind.BROADCAST:
        root = arguments.process_set.index_of(int(arguments.root_rank), "root_rank")
    elif kind is OperationKind.ALLTOALL:
        splits = _row_counts(len(arrays[0]), arguments.splits, ranks)
    request = Request(
        _request_name(controller, kind, arguments.name),
        kind._value_,  # `value` is a Python property, and this path is a large part of a small operation
        tuple([dtype_name(array.dtype) for array in arrays]),
        tuple([(VARYING, *array.shape[1:]) if spec.allows_uneven_rows else array.shape for array in arrays]),
        arguments.op._value_ if spec.is_reduction else "",
        root,
        float(arguments.prescale_factor) if spec.is_reduction else 1.0,
        float(arguments.postscale_factor) if spec.is_reduction else 1.0,
        arguments.detail,
    )
    buffers = OperationBuffers(arrays, outs, splits or ())
    # Automatic names repeat, so an earlier operation of this name may still run. A name that the program uses twice at
    # the same time is an error.
    handle = controller.submit(request, buffers, wake=wake, queue=not arguments.name)
    return PendingResult(controller, handle)


def run(
    kind: OperationKind, arrays: Sequence[Array], *, outs: Sequence[Array] | None = None, **arguments: Any
) -> list[Array]:
    """Run a collective and return its result; see `start` and `Arguments`."""
    result: list[Array] = start(kind, arrays, Arguments(**arguments), outs=outs, wake=False).wait()
    return result


def gradient(
    kind: OperationKind, gradients: Sequence[Array], arguments: Arguments, rows: Sequence[int] = ()
) -> list[Array]:
    """Return the gradients of a collective's inputs; all members of the process set must call this.

    Args:
        kind: The collective.
        gradients: The gradients of its results.
        arguments: The `for_gradient` arguments of the collective.
        rows: Numbers of rows. Allgather: what this rank contributed to each result. Alltoall: what it received from
            each rank.

    Raises: UnsupportedError if the collective has no gradient for this `op`.
    """
    return _COLLECTIVES[kind].gradient(gradients, arguments, rows)


def changes_row_count(kind: OperationKind) -> bool:
    """Return whether a collective's result can have another number of rows than its input."""
    return _COLLECTIVES[kind].changes_row_count


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all members have called this."""
    run(OperationKind.BARRIER, [], process_set=process_set)


def join() -> int:
    """Declare that this rank has no more data, and wait until all ranks have called this.

    Meanwhile, this rank contributes zeros to the sums and averages of the other ranks, and nothing to their Min, Max
    and Product. Averages are still divided by the number of all ranks. The other ranks can use allreduce and barrier;
    any other collective raises.

    Returns: the last rank that called this.
    """
    return global_process_set.controller.join()


def check_op(op: HorovodOp | None, average: bool | None = None) -> HorovodOp:
    """Return the reduction selected by `op` or by Horovod's older argument `average`."""
    if average is not None:
        if not isinstance(average, (bool, int, np.bool_)):
            raise ValueError(f"average is {average!r}; it must be True or False. Pass a name as name=...")
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, HorovodOp):
        raise ValueError(f"op is {op!r}; it must be one of hvd.{', hvd.'.join(each.value for each in HorovodOp)}.")
    return op


def raise_on_second_gradient(*_: object) -> None:
    """Raise UnsupportedError, in place of the gradient of a gradient, which only allreduce has."""
    raise UnsupportedError(
        "A gradient of the gradient of an allgather, broadcast, alltoall, reducescatter or SyncBatchNorm is not "
        "supported; of an allreduce it is."
    )


# ----------------------------------------------------------------------------------------------- checks of arguments


def _check_allreduce(kind: OperationKind, arrays: Sequence[Array], arguments: Arguments, ranks: int) -> None:
    for array in arrays:
        check_reducible(array.dtype, ReduceOp.SUM)
        if arguments.op is Average and array.dtype == np.bool_:
            raise ConfigurationError("booleans cannot be averaged. Use Min, Max or Sum (any), or cast them.")
    factors = arguments.prescale_factor, arguments.postscale_factor
    if not all(map(math.isfinite, factors)):
        raise ConfigurationError(f"prescale_factor and postscale_factor are {factors}: both must be finite.")
    if arguments.op is Adasum:
        adasum.check([array.dtype for array in arrays], ranks)


def _check_reducescatter(kind: OperationKind, arrays: Sequence[Array], arguments: Arguments, ranks: int) -> None:
    if arguments.op is Adasum:
        raise UnsupportedError(f"reducescatter cannot merge by {Adasum}. Use Average, Sum, Min, Max or Product.")
    _check_rows(kind, arrays, arguments, ranks)
    _check_allreduce(kind, arrays, arguments, ranks)


def _check_numbers(kind: OperationKind, arrays: Sequence[Array], arguments: Arguments, ranks: int) -> None:
    for array in arrays:
        if array.dtype.hasobject:
            raise ConfigurationError(
                f"{kind} got an array of Python objects. Use {kind}_object, or an array of numbers."
            )
        if issubclass(array.dtype.type, np.flexible):
            raise ConfigurationError(
                f"{kind} got an array of {array.dtype}: the size of strings and records can differ between ranks. Use "
                f"{kind}_object, or an array of numbers."
            )


def _check_rows(kind: OperationKind, arrays: Sequence[Array], arguments: Arguments, ranks: int) -> None:
    _check_numbers(kind, arrays, arguments, ranks)
    if not all(array.ndim for array in arrays):
        raise ConfigurationError(f"{kind} works on rows, and this array is a single number (0 dimensions).")


def _row_counts(rows: int, splits: Any, ranks: int) -> list[int]:
    """Return the number of rows that an alltoall sends to each rank."""
    if splits is None or not len(splits):
        if rows % ranks:
            raise ConfigurationError(
                f"alltoall without splits sends equal parts; {rows} rows cannot be divided by {ranks}. Pass splits."
            )
        return [rows // ranks] * ranks
    try:
        counts = [operator.index(count) for count in splits]
    except TypeError as error:
        raise ConfigurationError(f"alltoall got splits {list(splits)}: numbers of rows are integers.") from error
    if len(counts) != ranks or min(counts) < 0 or sum(counts) != rows:
        raise ConfigurationError(
            f"alltoall got splits {counts} for {rows} rows and {ranks} ranks: they must be one number of rows for each "
            f"rank, at least 0, and add up to the number of rows."
        )
    return counts


def check_name(function: str, name: Any) -> str | None:
    """Return the name of an operation. Raises ConfigurationError if it is not a string."""
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(f"{function} got the name {name!r}; a name is a string.")
    return name


def _request_name(controller: Controller, kind: OperationKind, given: str | None) -> str:
    if given := check_name(kind, given):
        try:
            given.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, which could not be sent
            raise ConfigurationError(f"{kind} got the name {given!r}, which cannot be printed.") from error
        return given
    counters = controller.automatic_names
    return f"{kind}.noname.{next(counters.setdefault(kind._value_, itertools.count())) % AUTOMATIC_NAMES}"


# ---------------------------------------------------------------------------------------------------------- gradients


def check_differentiable(arguments: Arguments) -> None:
    """Raise UnsupportedError for an allreduce op that has no gradient."""
    if arguments.op not in (Average, Sum, Adasum):
        raise UnsupportedError(
            f"allreduce with op={arguments.op.value} has no gradient here; Average, Sum and Adasum have."
        )


def _gradient_of_allreduce(gradients: Sequence[Array], arguments: Arguments, _: Sequence[int]) -> list[Array]:
    check_differentiable(arguments)
    merged: list[Array] = start(OperationKind.ALLREDUCE, gradients, arguments, wake=False).wait()
    return merged


def _average(gradients: Sequence[Array], arguments: Arguments) -> list[Array]:
    return run(OperationKind.ALLREDUCE, gradients, name=arguments.name, process_set=arguments.process_set)


def _gradient_of_allgather(gradients: Sequence[Array], arguments: Arguments, rows: Sequence[int]) -> list[Array]:
    merged, process_set = _average(gradients, arguments), arguments.process_set
    name = f"{arguments.name}.rows" if arguments.name else None
    (sizes,) = run(OperationKind.ALLGATHER, [np.array([rows], np.int64)], name=name, process_set=process_set)
    # `sizes` has a row for each rank and a column for each array of the group.
    starts = sizes[: process_set.rank()].sum(axis=0)
    return [each[start : start + count] for each, start, count in zip(merged, starts, rows, strict=True)]


def _gradient_of_broadcast(gradients: Sequence[Array], arguments: Arguments, _: Sequence[int]) -> list[Array]:
    merged, process_set = _average(gradients, arguments), arguments.process_set
    is_root = process_set.rank() == process_set.index_of(arguments.root_rank, "root_rank")
    return merged if is_root else [np.zeros_like(each) for each in merged]


def _gradient_of_alltoall(gradients: Sequence[Array], arguments: Arguments, rows: Sequence[int]) -> list[Array]:
    # The reverse: each rank gets back as many rows as it sent.
    returned = msgspec.structs.replace(arguments, splits=rows)
    return start(OperationKind.ALLTOALL, gradients, returned, wake=False).wait()[:1]  # type: ignore[no-any-return]


def _gradient_of_reducescatter(gradients: Sequence[Array], arguments: Arguments, _: Sequence[int]) -> list[Array]:
    if arguments.op not in (Average, Sum):
        raise UnsupportedError(
            f"reducescatter with op={arguments.op.value} has no gradient here; Average and Sum have."
        )
    # Horovod's convention; see the top of this file.
    factor = arguments.prescale_factor * arguments.postscale_factor
    factor *= arguments.process_set.size() if arguments.op is Sum else 1
    scaled = [(each * factor).astype(each.dtype) if factor != 1.0 else each for each in gradients]
    return run(OperationKind.ALLGATHER, scaled, name=arguments.name, process_set=arguments.process_set)


_COLLECTIVES = {
    OperationKind.ALLREDUCE: CollectiveSpec(_check_allreduce, _gradient_of_allreduce, is_reduction=True),
    OperationKind.ALLGATHER: CollectiveSpec(
        _check_rows, _gradient_of_allgather, allows_uneven_rows=True, changes_row_count=True
    ),
    OperationKind.BROADCAST: CollectiveSpec(_check_numbers, _gradient_of_broadcast),
    OperationKind.ALLTOALL: CollectiveSpec(
        _check_rows, _gradient_of_alltoall, allows_uneven_rows=True, changes_row_count=True
    ),
    OperationKind.REDUCESCATTER: CollectiveSpec(
        _check_reducescatter, _gradient_of_reducescatter, is_reduction=True, changes_row_count=True
    ),
    OperationKind.BARRIER: CollectiveSpec(_check_numbers, lambda *_: []),
}
