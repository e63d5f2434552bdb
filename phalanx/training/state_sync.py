"""State synchronization: all replicas start with the same structure and the chief's values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from phalanx.collectives.communicator import ReduceOp
from phalanx.engines import buffers
from phalanx.engines.random_state import keeps_random_state, random_state, seed_from_rank, set_random_state
from phalanx.keras_compat.model_state import optimizers, sync_jax_state
from phalanx.keras_compat.variables.host_values import host_copy, to_host
from phalanx.training.checks.same_model import check_same_model
from phalanx.training.replica import Replica

# An odd constant far from small multiples, so that the seeds of neighboring ranks share no low bits
# (2**32 divided by the golden ratio; Knuth, The Art of Computer Programming, 6.4).
SEED_STRIDE = 0x9E3779B9


def synchronize(model: Any, replica: Replica, *, metrics: bool = False, adopt: bool = True) -> None:
    """Set every rank to the chief's weights, optimizer state and layer state; call on all ranks.

    Random seeds of layers (dropout) also come from the chief, shifted by the rank so that replicas draw different
    masks, and so does the position of the streams in `PerRankRandomStreams`.

    Args:
        metrics: Whether to send metric counts, for ranks that join in the middle of an epoch.
        adopt: Whether this rank adopts the values; otherwise it only takes part.

    Raises:
        DisagreementError: if the models differ in structure; names the first difference. See `RankComparison`.
    """
    if replica.is_alone and not replica.micro_batches:
        return
    if replica.mesh_parts is not None:
        _synchronize_copies(model, replica)
        return
    variables = variables_of(model) + (list(model.metrics_variables) if metrics else [])
    check_same_model(variables, replica, with_paths=not replica.has_copies)
    arrays = [to_host(variable) for variable in variables]
    random = _random_state_to_share(replica)
    received = replica.communicator.broadcast([*arrays, *random], root=0)
    values, chiefs_random = received[: len(arrays)], received[len(arrays) :]
    if not adopt:
        return
    # Micro-batches have their own random numbers, which follow from the chief's.
    stream = 0 if replica.micro_batches else replica.rank
    seeds = {id(generator.state) for generator in seed_generators(model)}
    for variable, old, new in zip(variables, arrays, values, strict=True):
        if id(variable) in seeds:
            new = shifted_seed(new, stream)
        # Most are equal at the start of a `fit`. An assignment replaces the array on the device, and costs a transfer.
        if not np.array_equal(old, new):
            variable.assign(new)
    replica.random_streams.position = chiefs_random[0].tolist()
    set_random_state(chiefs_random[1:])


def _random_state_to_share(replica: Replica) -> list[np.ndarray[Any, Any]]:
    """Return the position of the streams, and the backend's random state for processes that may have joined late, and
    for micro-batches, whose numbers follow from it. In other jobs a program may give its ranks different states."""
    position = np.array(replica.random_streams.position, np.uint64)
    return [position, *(random_state()[:1] if replica.elastic is not None or replica.micro_batches else [])]


def seed_per_rank(replica: Replica) -> None:
    """Derive a different random state for each rank from the chief's, if no trainer takes the steps."""
    if keeps_random_state():
        seed_from_rank(replica.communicator.broadcast(random_state()[:1], root=0), replica.rank)


def _synchronize_copies(model: Any, replica: Replica) -> None:
    """Synchronize a program that spans all ranks: set variables that are copied on all ranks to the chief's values. Of
    divided variables each rank has its own part, which no other rank has."""
    variables = [*variables_of(model), *model.metrics_variables]
    check_same_model(variables, replica)
    copied = [variable for variable in variables if getattr(variable.value, "is_fully_replicated", True)]
    arrays = [host_copy(variable) for variable in copied]
    chiefs = replica.communicator.broadcast(arrays, root=0)
    # Assigning to a variable that spans processes may be a collective of JAX, so all ranks must assign the same.
    differs = np.array([not np.array_equal(old, new) for old, new in zip(arrays, chiefs, strict=True)], np.uint8)
    (differ_somewhere,) = replica.communicator.all_reduce([differs], ReduceOp.MAX)
    for variable, value, assigns in zip(copied, chiefs, differ_somewhere, strict=True):
        if assigns:  # on all ranks, or on none
            variable.assign(value)


@contextmanager
def preserved_state(model: Any) -> Iterator[None]:
    """Restore weights, layer state, optimizer state, metrics and the backend's random state on exit."""
    variables = [*variables_of(model), *model.metrics_variables]
    # JAX arrays are immutable, and this process cannot read the whole of an array that spans several processes.
    divided = {id(v): v.value for v in variables if not getattr(v.value, "is_fully_addressable", True)}
    copied = [variable for variable in variables if id(variable) not in divided]
    before = [host_copy(variable) for variable in copied]
    random = random_state()
    yield
    set_random_state(random)
    for variable, value in zip(copied, before, strict=True):
        if not np.array_equal(to_host(variable), value):
            variable.assign(value)
    for variable in variables:
        if id(variable) in divided and variable.value is not divided[id(variable)]:
            variable.assign(divided[id(variable)])


@contextmanager
def preserved_metrics(model: Any) -> Iterator[None]:
    """Restore the metric counts on exit, whatever is evaluated inside."""
    sync_jax_state(model)
    variables = list(model.metrics_variables)
    before = [host_copy(variable) for variable in variables]
    try:
        yield
    finally:
        sync_jax_state(model)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def average_optimizers(model: Any, replica: Replica, share: float) -> None:
    """Set every rank to the mean of all ranks' optimizer variables; call on all ranks.

    Scalars (step counts, learning rates, the scale of the loss) are the chief's.

    Args:
        share: Weight of this rank's variables in the mean; the sum over all ranks is 1.
    """
    variables = [variable for optimizer in optimizers(model) for variable in optimizer.variables]
    arrays = [to_host(variable) for variable in variables]
    averaged = [v for v in variables if len(v.shape) and keras.backend.is_float_dtype(v.dtype)]
    chosen = {id(variable) for variable in averaged}
    communicator = replica.communicator
    means = communicator.all_reduce([a for v, a in zip(variables, arrays, strict=True) if id(v) in chosen], scale=share)
    rest = [variable for variable in variables if id(variable) not in chosen]
    values = communicator.broadcast([a for v, a in zip(variables, arrays, strict=True) if id(v) not in chosen])
    for variable, value in [*zip(averaged, means, strict=True), *zip(rest, values, strict=True)]:
        variable.assign(value)


def variables_of(model: Any) -> list[Any]:
    """Return weights, layer state and optimizer state of a model, each once."""
    found = {id(v): v for v in [*model.trainable_variables, *model.non_trainable_variables, *buffers(model)]}
    for optimizer in optimizers(model):
        found |= {id(v): v for v in optimizer.variables}
    return list(found.values())


def seed_generators(model: Any) -> list[Any]:
    """Return the seed generators of all layers."""
    return [generator for layer in model._flatten_layers() for generator in layer._seed_generators]


def shifted_seed(state: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    """Return the state of a seed generator, shifted so that each rank draws different numbers."""
    shifted = state.copy()
    modulus = 1 << (8 * state.dtype.itemsize - (state.dtype.kind == "i"))
    shifted[0] = (int(state[0]) + rank * SEED_STRIDE) % modulus
    return shifted
