"""Checks that all ranks have built the same model. `same_program` compares arguments and data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import msgspec

from phalanx.cluster.task_comparison import describe_difference
from phalanx.errors import DisagreementError
from phalanx.training.checks.rank_comparison import RankComparison
from phalanx.training.replica import Replica
from phalanx.transport.decoding import decode_message


def structure_of(variables: Sequence[Any], *, with_paths: bool = True) -> list[tuple[str, list[int], str]]:
    """Return path, shape and dtype of each variable, in their order.

    Args:
        with_paths: Whether the paths of variables count as a difference.
    """
    return [
        (v.path if with_paths else "variable", list(v.shape), keras.backend.standardize_dtype(v.dtype))
        for v in variables
    ]


def check_same_model(variables: Sequence[Any], replica: Replica, *, with_paths: bool = True) -> None:
    """Compare the structure of the ranks' models; call on all ranks.

    Args:
        variables: Variables of the model and its optimizers.
        with_paths: See `structure_of`.

    Raises: DisagreementError, naming the first difference between two ranks; see `RankComparison`.
    """
    comparison = RankComparison(replica)
    encoded = msgspec.msgpack.encode(structure_of(variables, with_paths=with_paths))
    digests = replica.communicator.all_gather_bytes(hashlib.sha256(encoded).digest())
    if len(set(digests)) == 1:
        return
    # Rare and slow: every rank receives everything, so that all know which one differs.
    structures = [decode_message(e) for e in replica.communicator.all_gather_bytes(encoded)]
    difference = comparison.difference(structures)
    if difference is not None:
        expected, rank = difference
        raise different_models_error(structures[expected], structures[rank], f"rank {expected}", f"rank {rank}")


def check_chiefs_model(chiefs: Sequence[Any], own: Sequence[Any]) -> None:
    """Compare a model with the chief's, on this rank only: a joining process must not end a running job.

    Args:
        chiefs, own: Results of `structure_of`.

    Raises: DisagreementError, naming the first difference.
    """
    if [tuple(each) for each in chiefs] != own:
        raise different_models_error(chiefs, own, "the chief", "this worker")


def different_models_error(first: Sequence[Any], second: Sequence[Any], who: str, other: str) -> DisagreementError:
    """Return the error for two ranks whose models have different structures."""
    named, others = ([f"`{path}` {dtype}{list(shape)}" for path, shape, dtype in each] for each in (first, second))
    return DisagreementError(
        f"The model is not the same on all ranks: {describe_difference(named, others, who, other)} "
        f"Every rank must build the same model with the same optimizer, in the same order."
    )
