"""Everybody starts alike: parameters and optimizer state of one rank, on all. Names and meaning are Horovod's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from phalanx.errors import ConfigurationError
from phalanx.horovod import operations
from phalanx.horovod.horovod_job import current
from phalanx.horovod.object_collectives import allgather_object, broadcast_bytes, broadcast_object
from phalanx.horovod.process_sets import ProcessSet, global_process_set
from phalanx.horovod.torch.host_tensors import all_to_host
from phalanx.horovod.torch.mpi_ops import _put_back

_PLAIN = (type(None), bool, int, float, str)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Put rank `root_rank`'s parameters into everybody's.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`; what is no tensor is left
            alone.

    Raises:
        ConfigurationError: it is none of these.
        HorovodInternalError: the ranks' parameters differ in number, shape or dtype.
    """
    if isinstance(params, Mapping):
        values = [value for _, value in sorted(params.items(), key=lambda pair: str(pair[0]))]
    else:
        given = list(params)
        if any(not isinstance(each, tuple) and not torch.is_tensor(each) for each in given):
            raise ConfigurationError(
                "broadcast_parameters takes model.state_dict(), model.named_parameters() or model.parameters()."
            )
        values = [each[1] if isinstance(each, tuple) else each for each in given]
    _broadcast([value for value in values if torch.is_tensor(value)], root_rank, "parameters", process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Put the state of rank `root_rank`'s optimizer, its options included, into everybody's.

    Only the root needs to have a state, as after loading a checkpoint there. Plain values and tensors are not pickled;
    other ones are, which needs a job with a secret.

    Args:
        model: not needed here.

    Raises: ConfigurationError for LBFGS, whose state cannot be taken apart.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("broadcast_optimizer_state cannot be used with torch.optim.LBFGS.")
    is_root = current().membership.rank == root_rank
    tensors: list[torch.Tensor] = []
    odd: list[Any] = []
    description = msgspec.msgpack.encode(_describe(optimizer.state_dict(), tensors, odd)) if is_root else b""
    description = broadcast_bytes(description, root_rank, "optimizer_state", process_set)
    decoded = msgspec.msgpack.decode(description)
    if not is_root:
        _find_tensors(decoded, tensors)
    _broadcast(tensors, root_rank, "optimizer_state.tensors", process_set)
    if _has_odd(decoded):
        odd = broadcast_object(odd, root_rank, "optimizer_state.objects", process_set)
    if not is_root:
        optimizer.load_state_dict(_build(decoded, iter(tensors), iter(odd)))


def _broadcast(tensors: list[torch.Tensor], root_rank: int, name: str, process_set: ProcessSet) -> None:
    arrays = all_to_host(tensors)
    pending = operations.broadcast(
        arrays, root_rank, name=f"broadcast.{name}", process_set=process_set, outs=arrays, wake=False
    )
    _put_back(tensors, pending.wait())


# A state as JSON's types: [kind, content] for all that is not plain.


def _describe(value: Any, tensors: list[torch.Tensor], odd: list[Any]) -> Any:
    if isinstance(value, np.generic):
        return _describe(value.item(), tensors, odd)
    if type(value) in _PLAIN and not (type(value) is int and value.bit_length() > 63):
        return value
    if torch.is_tensor(value):
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, dict):
        return ["dict", [[_describe(key, tensors, odd), _describe(item, tensors, odd)] for key, item in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_describe(item, tensors, odd) for item in value]]
    odd.append(value)
    return ["odd"]


def _find_tensors(described: Any, tensors: list[torch.Tensor]) -> None:
    for kind, content in _leaves(described):
        if kind == "tensor":
            dtype, shape = content
            tensors.append(torch.empty(shape, dtype=getattr(torch, dtype)))


def _has_odd(described: Any) -> bool:
    return any(kind == "odd" for kind, _ in _leaves(described))


def _leaves(described: Any) -> Iterator[tuple[str, list[Any]]]:
    """Kind and content of all that holds nothing else and is not plain, in order."""
    if not isinstance(described, list):
        return
    kind, *content = described
    if kind in ("tensor", "odd"):
        yield kind, content
        return
    for item in content[0]:
        for part in item if kind == "dict" else [item]:
            yield from _leaves(part)


def _build(described: Any, tensors: Any, odd: Any) -> Any:
    if not isinstance(described, list):
        return described
    kind, *content = described
    if kind == "tensor":
        return next(tensors)
    if kind == "odd":
        return next(odd)
    if kind == "dict":
        return {_build(key, tensors, odd): _build(item, tensors, odd) for key, item in content[0]}
    items = [_build(item, tensors, odd) for item in content[0]]
    return items if kind == "list" else tuple(items)


__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
