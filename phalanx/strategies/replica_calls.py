"""Calls of a model's methods that travel from an interactive session to the replicas that serve it.

A call travels as a pickle, over the job's authenticated links: its arguments by value, the model as `model_copies` has
it, and only where the serving replicas do not have it yet. Layers of the model in the arguments, such as the model that
a callback was given, travel as references.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from phalanx.collectives.cross_device_ops import CrossDeviceOps
from phalanx.engines.tensors import Tensors
from phalanx.keras_compat.copies import model_copies
from phalanx.keras_compat.copies.keras_settings import KerasSettings, keras_settings
from phalanx.keras_compat.copies.model_copies import LayerCopy
from phalanx.keras_compat.copies.object_attributes import PartAttributes
from phalanx.runtime.pickling import dumps_referring, loads_referring, refusing
from phalanx.training.call_pickling import A_CALL_TAKES, of_call
from phalanx.training.model_dispatch import has_trainer, policy_of
from phalanx.training.program_effects.program_random_state import random_state
from phalanx.training.training_policy import TrainingPolicy

PURPOSE = "replica-calls"
SERVER = "phalanx.strategies.replica_server"
"""The module that the other replicas run."""
MODELS_KEPT = 8
"""So many of the models that were called last are not made again when they are called again."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """A method of a model to call. The buffers: `SessionState`, perhaps the model, and the arguments.

    Attributes:
        model: The number of the model in the session. Two models may be described alike, and are two all the same.
        has_model: Whether the model travels too.
        arguments: Their names.
    """

    method: str
    model: int
    has_model: bool
    arguments: list[str]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The call was understood, and begins."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The method has returned."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It raised the error in the buffer; see `function_call.CallRaised`."""


class Settled(msgspec.Struct, frozen=True, tag=True):
    """All replicas have raised alike, so none waits for another, and the next call may come."""


Message = Call | Ready | Done | Failed | Settled


class ModelOfStrategy(NamedTuple):
    """A model, and how its strategy trains it."""

    copy: LayerCopy
    policy: TrainingPolicy
    cross_device_ops: CrossDeviceOps | None


class PackedCall(NamedTuple):
    """A call as it travels.

    Attributes:
        described: The model, which travels if the replicas do not have it yet.
        digest: Of what the replicas must have of it.
        arguments: Their pickles, by name.
        has_functions: See `SessionState`.
    """

    method: str
    described: ModelOfStrategy
    digest: bytes
    arguments: dict[str, bytes]
    has_functions: bool


Kept = TypeVar("Kept")


class KeptModels(OrderedDict[int, Kept]):
    """The records of the models that were called last, by number; MODELS_KEPT at most.

    The session and the replicas keep one each and use them alike, so that the session knows what the replicas have.
    """

    def note(self, number: int, known: Kept) -> None:
        """Learn something of a model, which is the last one called now."""
        self[number] = known
        self.move_to_end(number)
        while len(self) > MODELS_KEPT:
            self.popitem(last=False)


class SessionState(NamedTuple):
    """What of the program a call depends on besides its arguments.

    Attributes:
        attributes: Of the model, which may have changed since the replicas made theirs.
        has_functions: Whether the model has compiled functions here: they keep attributes as they were, in copies too.
    """

    path: list[str]
    settings: KerasSettings
    attributes: tuple[PartAttributes, ...]
    has_functions: bool
    random: bytes


def pack(
    model: Any,
    method: str,
    arguments: Mapping[str, Any],
    cross_device_ops: CrossDeviceOps | None,
    tensors: Tensors,
) -> PackedCall:
    """A call as it travels.

    Raises: UnsupportedError naming what cannot travel.
    """
    described = ModelOfStrategy(model_copies.copy_of(model), policy_of(model), cross_device_ops)
    # A copy that the others have is built by the call that has built the model here.
    known_by = pack_model(described._replace(copy=described.copy.unbuilt()), tensors)
    places = {id(layer): number for number, layer in enumerate(model._flatten_layers())}
    pickles = {
        name: _pickled(value, f"{method}({name}=...)", tensors, places)
        for name, value in arguments.items()
        if value is not None
    }
    return PackedCall(method, described, hashlib.sha256(known_by).digest(), pickles, has_trainer(model))


def pack_model(described: ModelOfStrategy, tensors: Tensors) -> bytes:
    """A model as it travels. Raises: UnsupportedError if it cannot."""
    return _pickled(described, "The model", tensors, {})


def session_state(call: PackedCall) -> bytes:
    attributes = call.described.copy.attributes
    return pickle.dumps(SessionState(list(sys.path), keras_settings(), attributes, call.has_functions, random_state()))


def unpack_arguments(contents: Mapping[str, memoryview], model: Any) -> dict[str, Any]:
    """The arguments of a call, with this process's model where the caller's was."""
    layers = list(model._flatten_layers())
    return {name: loads_referring(content, layers.__getitem__) for name, content in contents.items()}


def _pickled(thing: Any, what: str, tensors: Tensors, places: Mapping[int, int]) -> bytes:
    """
    Args:
        what: Names it in errors.
        places: Of the layers that the other replicas have, by their ids; others travel with their weights.
    """
    with refusing(
        f"{what} cannot travel to the other replicas of this session",
        f"{A_CALL_TAKES}, or put the training into a function and call phalanx.launch(function, workers=N).",
    ):
        reduce = of_call(tensors, with_weights=bool(places))
        return dumps_referring(thing, lambda each: places.get(id(each)), reduce)
