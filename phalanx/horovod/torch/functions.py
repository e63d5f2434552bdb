"""Broadcasts of parameters and optimizer state from one rank. Names and semantics are Horovod's."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from phalanx.errors import ConfigurationError
from phalanx.horovod import operations
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.horovod_job import current_job
from phalanx.horovod.object_collectives import allgather_object, broadcast_bytes, broadcast_object, check_pickle_is_safe
from phalanx.horovod.operation_request import OperationKind
from phalanx.horovod.torch.host_tensors import all_to_host, write_back


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the parameters of all ranks with those of rank `root_rank`.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`. Values that are not tensors
            stay unchanged.
        root_rank: Rank in the job whose parameters are sent.
        process_set: The ranks that take part.

    Raises:
        ConfigurationError: `params` is none of these.
        HorovodInternalError: the ranks' parameters differ in number, shape or dtype.
    """
    if isinstance(params, Mapping):
        # Ranks may have inserted the parameters in different orders.
        values = [value for _, value in sorted(params.items(), key=lambda pair: str(pair[0]))]
    else:
        given = list(params)
        if any(not isinstance(each, tuple) and not torch.is_tensor(each) for each in given):
            raise ConfigurationError(
                "broadcast_parameters takes model.state_dict(), model.named_parameters() or model.parameters()."
            )
        values = [each[1] if isinstance(each, tuple) else each for each in given]
    tensors = [value for value in values if torch.is_tensor(value)]
    # On the CPU, the arrays are the parameters' memory, and `write_back` has nothing to do.
    arrays = all_to_host(tensors)
    operations.run(
        OperationKind.BROADCAST,
        arrays,
        outs=arrays,
        name="broadcast.parameters",
        root_rank=root_rank,
        process_set=process_set,
    )
    write_back(arrays, tensors)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the state and options of all ranks' optimizers with those of rank `root_rank`.

    Only the root needs a state, for example from a checkpoint. Tensors and plain values are sent in a form that cannot
    run code (`torch.load(weights_only=True)`); other values require a job with a secret.

    Args:
        optimizer: An optimizer of the same class and for the same parameters on all ranks.
        root_rank: Rank in the job whose state is sent.
        model: The model, if it has sparse embeddings that an optimizer other than SparseAdam trains.
        process_set: The ranks that take part.

    Raises: ConfigurationError for LBFGS, whose state cannot be sent, and for other values in a job without a secret.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("broadcast_optimizer_state cannot be used with torch.optim.LBFGS.")
    is_root, buffer = current_job().membership.rank == root_rank, io.BytesIO()
    if is_root:
        state = optimizer.state_dict()
        groups = [{key: _plain(value) for key, value in group.items()} for group in state["param_groups"]]
        torch.save({**state, "param_groups": groups}, buffer)
    received = broadcast_bytes(buffer.getvalue(), root_rank, "optimizer_state", process_set)
    try:
        state = torch.load(io.BytesIO(received), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # the root also loads, so that all ranks raise
        check_pickle_is_safe("broadcast_optimizer_state")
        state = torch.load(io.BytesIO(received), map_location="cpu", weights_only=False)
    if not is_root:
        optimizer.load_state_dict(state)
    elif (reducer := getattr(optimizer, "_hvd_reducer", None)) is not None:
        reducer.reset()  # as loading does on the other ranks: all expect the gradients of a whole step
    if not state["state"]:
        _fill_gradients(optimizer, model)


def _fill_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Set missing gradients to zero, as Horovod does if the state is empty."""
    embeddings = [each for each in model.modules() if getattr(each, "sparse", False)] if model is not None else []
    sparse = {id(parameter) for embedding in embeddings for parameter in embedding.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                zeros = torch.zeros_like(parameter)
                is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse
                parameter.grad = zeros.to_sparse(1) if is_sparse else zeros


def _plain(value: Any) -> Any:
    """Convert NumPy numbers to Python numbers, which can be loaded without a secret."""
    return value.item() if isinstance(value, np.generic) else value


__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
