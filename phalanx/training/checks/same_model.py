"""Checks that all ranks have built the same model. `same_program` compares arguments and data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import msgspec

from phalanx.cluster.task_comparison import describe_difference
from phalanx.errors import DisagreementError
from phalanx.training.replica import Replica
from phalanx.transport.decoding import decode_message


def check_same_model(variables: Sequence[Any], replica: Replica, *, with_paths: bool = True) -> None:
    """Compare the structure of the ranks' models; call on all ranks.

    Args:
        variables: of the model and its optimizers, in their order.
        with_paths: whether the variables' paths must be the same, and not only shapes and dtypes.

    Raises: DisagreementError on every rank, naming the first difference.
    """
    structure = [
        (v.path if with_paths else "variable", tuple(v.shape), keras.backend.standardize_dtype(v.dtype))
        for v in variables
    ]
    encoded = msgspec.msgpack.encode(structure)
    digests = replica.communicator.all_gather_bytes(hashlib.sha256(encoded).digest())
    if len(set(digests)) == 1:
        return
    # Rare and slow: all ranks get everything, so that all raise the same error.
    structures = [decode_message(e) for e in replica.communicator.all_gather_bytes(encoded)]
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    chiefs, others = ([_named(variable) for variable in structures[rank]] for rank in (0, other))
    raise DisagreementError(
        f"The model is not the same on all ranks: {describe_difference(chiefs, others, 'rank 0', f'rank {other}')} "
        f"Every rank must build the same model with the same optimizer, in the same order."
    )


def _named(variable: Any) -> str:
    path, shape, dtype = variable
    return f"`{path}` {dtype}{list(shape)}"
