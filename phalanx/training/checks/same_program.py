"""Checks that all ranks run the same program: the same methods, arguments and data; see also `same_model`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.data import ShardedInput
from phalanx.errors import DisagreementError
from phalanx.keras_compat.copies.object_config import config_of
from phalanx.keras_compat.model_state import PLAIN, optimizers
from phalanx.training.checks.rank_comparison import RankComparison
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.replica import Replica
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker

_NOT_COMPARED = ("name", "learning_rate")
"""Keys of a configuration that are not compared: Keras numbers names, and the learning rate is the chief's."""

_INPUT = "input"
"""Subject of the chief's message about its data."""

_SEED_ADVICE = (
    "If they are made or split at random, give a seed (`random_state=0`, `np.random.default_rng(0)`, and to PyTorch's "
    "random_split `generator=torch.Generator().manual_seed(0)`). Sort what comes from a set or a directory."
)


def compare_inputs(source: ShardedInput, replica: Replica, method: str) -> None:
    """Compare lengths, shapes and dtypes of the data that the ranks passed to a method of the model.

    Raises: DisagreementError, if they differ; see `RankComparison`.
    """
    comparison = RankComparison(replica)
    signatures = gather_for_method(replica, method, source.description.signature)
    difference = comparison.difference(signatures)
    if difference is not None:
        expected, rank = difference
        raise DisagreementError(
            f"The ranks were given different data: rank {expected} has {signatures[expected]}; rank {rank} has "
            f"{signatures[rank]}. Every rank must pass the same data; Phalanx divides it. To give each "
            f"rank its own, use `strategy.distribute_datasets_from_function`."
        )


def gather_for_method(replica: Replica, method: str, text: str) -> list[str]:
    """Gather every rank's text about the model method that it called.

    Raises: DisagreementError, if they called different methods; see `RankComparison`.
    """
    comparison = RankComparison(replica)
    gathered = [
        each.decode().partition("\n") for each in replica.communicator.all_gather_bytes(f"{method}\n{text}".encode())
    ]
    # The method travels with the first comparison of every call, so that a rank in `evaluate` and one in `fit` notice
    # it here instead of waiting for each other in different collectives.
    methods = [name for name, _, _ in gathered]
    difference = comparison.difference(methods)
    if difference is not None:
        expected, rank = difference
        raise DisagreementError(
            f"Rank {expected} called {methods[expected]}() where rank {rank} called {methods[rank]}(). Every rank must "
            f"call the same methods of the model: do not put them under `if strategy.is_chief`."
        )
    return [text for _, _, text in gathered]


def compare_samples(source: ShardedInput, replica: Replica) -> None:
    """Compare a sample of the values in the ranks' data.

    Raises: DisagreementError, if the values differ, or are in another order; see `RankComparison`.
    """
    comparison = RankComparison(replica)
    samples, expected = replica.communicator.all_gather(source.sampled_values), comparison.reference_rank
    difference = comparison.difference([_same(sample, samples[expected]) for sample in samples])
    if difference is not None:
        raise DisagreementError(
            f"The ranks were given different data: the values of rank {difference.rank} differ from those of rank "
            f"{expected}, or are in another order. Every rank must pass the same data; Phalanx divides it. "
            f"{_SEED_ADVICE} To give each rank its own data, use `strategy.distribute_datasets_from_function`."
        )


def send_input(source: ShardedInput, worker: ParameterServerWorker, fit: int) -> None:
    """On the chief with parameter servers, send what the other workers compare their data with."""
    signature = np.frombuffer(source.description.signature.encode(), np.uint8)
    worker.broadcast(_INPUT, [signature, source.sampled_values, np.array([fit], np.int64)], fit)


def compare_input_with_chief(source: ShardedInput, worker: ParameterServerWorker, fit: int) -> None:
    """On another worker with parameter servers, compare its data with the chief's.

    Raises: DisagreementError if they differ.
    """
    message = worker.receive_broadcast(_INPUT, fit)
    # A late worker may receive the message of a later `fit`, if this one is over.
    if message is None or np.frombuffer(message[2], np.int64)[0] != fit:
        return
    own = source.description.signature, source.sampled_values.tobytes()
    if why := _difference((bytes(message[0]).decode(), message[1]), own):
        raise DisagreementError(
            f"The workers were given different data: {why} Every worker must pass the same data, of which the first "
            f"server hands out the batches."
        )


def _same(sample: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    # Not bitwise: hosts with different processors round differently.
    return sample.shape == other.shape and np.allclose(sample, other, rtol=1e-3, atol=1e-3, equal_nan=True)


def check_same_configuration(model: Any, call: FitArguments, replica: Replica) -> None:
    """Compare the arguments of `fit` and `compile`.

    Raises: DisagreementError, if they differ (see `RankComparison`): gradients of two losses, or two kinds of updates,
    do not make one model.
    """
    comparison = RankComparison(replica)
    # Compared as text: a late rank that called another method has sent something else.
    texts = gather_for_method(replica, "fit", json.dumps(_facts(model, call)))
    difference = comparison.difference(texts)
    if difference is not None:
        expected, rank = difference
        _compare_facts(json.loads(texts[expected]), json.loads(texts[rank]), f"rank {expected}", f"rank {rank}")


def _compare_facts(first: Mapping[str, str], second: Mapping[str, str], who: str, other: str) -> None:
    for key in dict.fromkeys(itertools.chain(first, second)):
        if first.get(key) != second.get(key):
            raise DisagreementError(
                f"The ranks got different arguments: {key} is {first.get(key)} on {who}, and {second.get(key)} on "
                f"{other}. The same program, with the same arguments, must run on every rank."
            )


def describe_program(model: Any, call: FitArguments, inputs: Sequence[ShardedInput]) -> list[Any]:
    """Return the arguments of `fit` and `compile`, and fingerprints of the data, in a form that can be sent.

    Args:
        inputs: Training data, and validation data if there are any.
    """
    return [_facts(model, call), [[each.description.signature, each.sampled_values.tobytes()] for each in inputs]]


def check_chiefs_program(chiefs: list[Any], own: list[Any]) -> None:
    """Compare a program with the chief's, on this rank only: a joining process must not end a running job.

    Args:
        chiefs, own: Results of `describe_program`.

    Raises: DisagreementError if they differ.
    """
    (chiefs_facts, chiefs_inputs), (own_facts, own_inputs) = chiefs, own
    _compare_facts(chiefs_facts, own_facts, "the chief", "this worker")
    for theirs, ours in zip(chiefs_inputs, own_inputs, strict=True):
        if why := _difference(theirs, ours):
            raise DisagreementError(f"The ranks were given different data: {why} Every rank must pass the same data.")


def _difference(chiefs: Sequence[Any], own: Sequence[Any]) -> str:
    """Describe how this rank's data differ from the chief's, as signature and probe bytes; empty if they are equal."""
    if chiefs[0] != own[0]:
        return f"the chief has {chiefs[0]}; this worker has {own[0]}."
    if not _same(*(np.frombuffer(probe, np.float64) for _, probe in (chiefs, own))):
        return f"the values of this worker are not those of the chief, or are in another order. {_SEED_ADVICE}"
    return ""


def _facts(model: Any, call: FitArguments) -> dict[str, str]:
    facts: dict[str, Any] = {
        "epochs of fit()": call.epochs,
        # Only whether they were given: the values are compared like the training data's.
        "validation data of fit()": "given" if call.validation_data is not None else "not given",
        "validation_freq of fit()": call.validation_freq,
    }
    loss, metrics = getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None)
    if loss is not None:
        facts |= {"loss": loss._user_loss, "loss_weights": loss._user_loss_weights}
    if metrics is not None:
        facts |= {"metrics": metrics._user_metrics, "weighted_metrics": metrics._user_weighted_metrics}
    facts["optimizer"] = [type(optimizer).__name__ for optimizer in optimizers(model)]
    for number, optimizer in enumerate(optimizers(model)):
        # Messages name the first as users do; several of one class need different keys.
        kind = type(optimizer).__name__ if number == 0 else f"{type(optimizer).__name__} ({number + 1})"
        facts |= {f"{name} of {kind}": value for name, value in _settings(optimizer).items()}
    return {name: _stable_text(value) for name, value in facts.items()}


def _settings(obj: Any) -> dict[str, Any]:
    """Return the plain values in the configuration of a Keras object; empty if it has none."""
    try:
        configuration = config_of(obj)
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return {}
    return {k: v for k, v in configuration.items() if isinstance(v, PLAIN) and k not in _NOT_COMPARED}


def _stable_text(obj: Any) -> str:
    """Return the same text on all ranks for the same object: without addresses, and in a fixed order."""
    if isinstance(obj, PLAIN):
        return repr(obj)
    if isinstance(obj, Mapping):
        return "{" + ", ".join(f"{name!r}: {_stable_text(value)}" for name, value in obj.items()) + "}"
    if isinstance(obj, list | tuple):
        return "[" + ", ".join(map(_stable_text, obj)) + "]"
    if hasattr(obj, "get_config"):
        settings = ", ".join(f"{name}={value!r}" for name, value in _settings(obj).items())
        return f"{type(obj).__name__}({settings})"
    return str(getattr(obj, "__name__", type(obj).__name__))
