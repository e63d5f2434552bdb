"""Horovod's tensor functions, built from the table of collectives (`operations`) for each framework.

A function is one of five collectives in one of several forms. Its name states the form: `grouped_` takes several
tensors that travel together, `_async` returns a handle instead of the result, and a trailing underscore writes the
result into the given tensors. `make_collective_function` creates any of them from its name. The order of the parameters
differs between Horovod's modules; the order of `horovod.torch` is the default here. Two functions of each framework,
`Run` and `Start`, hide all other differences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.errors import ConfigurationError
from phalanx.horovod import operations
from phalanx.horovod.common.process_sets import global_process_set
from phalanx.horovod.compressors import Compression, run_compressed
from phalanx.horovod.operation_request import Array, OperationKind
from phalanx.horovod.operations import Arguments, Average, PendingResult, check_op

Tensor = Any


Run = Callable[[OperationKind, Sequence[Tensor], Arguments, Any], list[Tensor]]
"""`run(kind, tensors, arguments, compression)` returns the result of a collective as new tensors, differentiable if the
framework differentiates. An alltoall has a second result, the number of rows received from each rank."""

Start = Callable[..., PendingResult]
"""`start(kind, tensors, arguments, in_place=False, wake=True)` starts a collective, see `operations.start`; with
`in_place`, the result is written into the tensors."""


class ArrayFramework:
    """A framework whose tensors two functions convert to arrays and back, without gradients: NumPy, JAX, Keras.

    Args:
        module: Name of the module that gets the functions.
        to_array: Function that returns the values of a tensor; the array is not written to.
        from_array: Function that converts a new array to a tensor.
    """

    def __init__(self, module: str, to_array: Callable[[Tensor], Array], from_array: Callable[[Array], Tensor]):
        self._module = module
        self._to_array = to_array
        self._from_array = from_array

    def run(
        self, kind: OperationKind, tensors: Sequence[Tensor], arguments: Arguments, compression: Any
    ) -> list[Tensor]:
        """See `Run`."""

        def reduce(arrays: Sequence[Any]) -> list[Array]:
            results: list[Array] = operations.start(kind, list(map(np.asarray, arrays)), arguments, wake=False).wait()
            return results

        arrays = list(map(self._to_array, tensors))
        # An alltoall has one more result than inputs, so results cannot be decompressed in pairs.
        results = reduce(arrays) if kind is OperationKind.ALLTOALL else run_compressed(compression, arrays, reduce)
        return list(map(self._from_array, results))

    def start(
        self,
        kind: OperationKind,
        tensors: Sequence[Tensor],
        arguments: Arguments,
        *,
        in_place: bool = False,
        wake: bool = True,
    ) -> PendingResult:
        """See `Start`; never in place."""
        pending = operations.start(kind, list(map(self._to_array, tensors)), arguments, wake=wake)
        pending.finish = lambda results: list(map(self._from_array, results))
        return pending

    def make_collective_function(self, name: str, parameters: str | None = None) -> Callable[..., Any]:
        """See `make_collective_function`."""
        return make_collective_function(self._module, name, parameters, run=self.run, start=self.start)


def synchronize(handle: PendingResult) -> Any:
    """Wait for the result of an asynchronous operation and return it.

    Raises: HorovodInternalError if the operation failed.
    """
    if not isinstance(handle, PendingResult):
        raise ConfigurationError(f"synchronize got {handle!r}; pass what a function with _async in its name returned.")
    return handle.wait()


def poll(handle: PendingResult) -> bool:
    """Whether `synchronize` would return immediately."""
    return handle.done()


def check_integers_preserved(array: Array, dtype: str) -> None:
    """Raise ConfigurationError if integers do not fit into 32 bits, to which JAX truncates them.

    Args:
        array: The values.
        dtype: Name of the dtype of the tensor that was created from the array.
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


# ------------------------------------------------------------------------------------------------ making the functions

_DEFAULTS: dict[str, Any] = {
    "average": None,
    "compression": Compression.none,
    "device_dense": "",
    "device_sparse": "",
    "ignore_name_scope": False,
    "name": None,
    "op": None,
    "postscale_factor": 1.0,
    "prescale_factor": 1.0,
    "process_set": global_process_set,
    "splits": None,
}
"""Defaults by parameter; other parameters are required."""

_PARAMETERS = {
    OperationKind.ALLREDUCE: "average name compression op prescale_factor postscale_factor process_set",
    OperationKind.ALLGATHER: "name process_set",
    OperationKind.BROADCAST: "root_rank name process_set",
    OperationKind.ALLTOALL: "splits name process_set",
    OperationKind.REDUCESCATTER: "name compression op process_set prescale_factor postscale_factor",
}
"""Parameters that follow the tensors, as in `horovod.torch`. Asynchronous and in-place forms do not compress."""

ARRAY_FUNCTIONS = [
    *(f"{kind}{suffix}" for kind in _PARAMETERS for suffix in ("", "_async")),
    *(f"grouped_{kind}{suffix}" for kind in ("allreduce", "allgather", "reducescatter") for suffix in ("", "_async")),
]
"""Names of the functions of every framework with asynchronous operations."""

_SUMMARIES = {
    OperationKind.ALLREDUCE: "Reduce each tensor over the ranks; every rank gets the result.",
    OperationKind.ALLGATHER: "Concatenate each tensor of all ranks along the first dimension, which may differ.",
    OperationKind.BROADCAST: "Send the tensor of one rank to all ranks.",
    OperationKind.ALLTOALL: "Send some rows of the tensor to each rank, and concatenate the rows received.",
    OperationKind.REDUCESCATTER: "Reduce each tensor over the ranks; every rank gets its share of the rows of the "
    "result. The first ranks get one more where the rows cannot be divided equally.",
}
_DESCRIPTIONS = {
    "tensor": "A numeric tensor.",
    "value": "A numeric tensor, or a value that can be converted to one.",
    "tensors": "Numeric tensors, fused into one operation.",
    "average": "Older form of `op`: True for Average, False for Sum.",
    "name": "Name of the operation; equal on all ranks. By default, the n-th call without a name on one rank matches "
    "the n-th one on every other rank.",
    "compression": "Compressor for the transfer, see `Compression`.",
    "op": "The reduction: Average (default), Sum, Min, Max or Product; for an allreduce also Adasum.",
    "prescale_factor": "Factor applied before the reduction.",
    "postscale_factor": "Factor applied to the result.",
    "process_set": "The ranks that take part.",
    "root_rank": "Rank in the job whose tensor is sent.",
    "splits": "Number of rows for each rank, which may be 0; None for equal parts.",
    "device_dense": "Ignored; values are reduced on the host.",
    "device_sparse": "Ignored; see `device_dense`.",
    "ignore_name_scope": "Ignored.",
}


class _Parameters:
    """The parameters of a function. Binds arguments like `inspect.Signature.bind`, but in less than a microsecond.

    Args:
        names: Names in order.
        defaults: Default values by name; other parameters are required.
    """

    def __init__(self, names: Sequence[str], defaults: Mapping[str, Any]):
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        self.signature = inspect.Signature(
            [inspect.Parameter(name, kind, default=defaults.get(name, empty)) for name in names]
        )
        self._names = names
        self._defaults = defaults
        # Names that may still be passed as keywords, by number of positional arguments.
        self._after = [frozenset(names[count:]) for count in range(len(names) + 1)]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all parameters by name. Raises TypeError if the arguments do not match them."""
        values = {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}
        count, expected = len(args), len(self._names)
        # A name that was also passed by position is not among those that may follow.
        if count > expected or not kwargs.keys() <= self._after[count] or len(values) < expected:
            self.signature.bind(*args, **kwargs)  # raises
        return values


def make_collective_function(
    module: str, name: str, parameters: str | None = None, *, run: Run, start: Start | None = None
) -> Callable[..., Any]:
    """Create one of Horovod's functions.

    Args:
        module: Name of the function's module, where pickle finds it.
        name: Collective and form, such as "grouped_allreduce_async_".
        parameters: Names of the parameters in order, the tensor or tensors first; None for those of `horovod.torch`.
        run: The framework's collectives.
        start: The framework's asynchronous collectives, if the form needs them.
    """
    kind = OperationKind(name.removeprefix("grouped_").removesuffix("_").removesuffix("_async"))
    is_grouped, is_async, in_place = name.startswith("grouped_"), "_async" in name, name.endswith("_")
    if parameters is None:
        parameters = f"{'tensors' if is_grouped else 'tensor'} {_PARAMETERS[kind]}"
        if is_async or in_place:
            parameters = parameters.replace("compression ", "")
    first, *others = names = parameters.split()
    defaults = {each: _DEFAULTS[each] for each in others if each in _DEFAULTS}
    if kind is OperationKind.REDUCESCATTER:
        defaults["op"] = Average
    bound = _Parameters(names, defaults)

    def function(*args: Any, **kwargs: Any) -> Any:
        get = bound.bind(args, kwargs).get
        tensors: list[Tensor] = list(get(first, ())) if is_grouped else [get(first)]
        splits = get("splits")
        arguments = Arguments(
            get("name"),
            get("process_set", global_process_set),
            check_op(get("op"), get("average")),
            get("prescale_factor", 1.0),
            get("postscale_factor", 1.0),
            get("root_rank", 0),
            splits,
        )

        def select(results: list[Any]) -> Any:
            if is_grouped:
                return results
            return results[0] if splits is None else (results[0], results[1])

        if not (is_async or in_place):
            return select(run(kind, tensors, arguments, get("compression", Compression.none)))
        assert start is not None, "the framework has no asynchronous functions"
        # Without `wake`, this thread runs the rounds itself, in `wait` below.
        pending = start(kind, tensors, arguments, in_place=in_place, wake=is_async)
        convert = pending.finish
        assert convert is not None
        pending.finish = lambda results: select(convert(results))
        return pending if is_async else pending.wait()

    function.__module__, function.__name__, function.__qualname__ = module, name, name
    function.__doc__ = _build_docstring(kind, names, is_async=is_async, in_place=in_place)
    function.__signature__ = bound.signature  # type: ignore[attr-defined]
    return function


def _build_docstring(kind: OperationKind, names: Sequence[str], *, is_async: bool, in_place: bool) -> str:
    """Return the docstring of a function."""
    returns = "a list of the results" if names[0] == "tensors" else "the result"
    if kind is OperationKind.ALLTOALL:
        returns = "the rows received; with `splits`, also how many came from each rank (int32)"
    if in_place:
        returns = "the tensors given, which hold the result" if names[0] == "tensors" else "the tensor given"
    if is_async:
        returns = f"a handle at once; `synchronize(handle)` returns {returns}"
    return "\n".join(
        [
            _SUMMARIES[kind],
            "",
            "Args:",
            *(f"    {name}: {_DESCRIPTIONS[name]}" for name in names),
            "",
            f"Returns: {returns}.",
            "",
            "Raises:",
            "    ConfigurationError: an argument is invalid.",
            "    HorovodInternalError: the arguments differ between ranks, or communication failed.",
        ]
    )
