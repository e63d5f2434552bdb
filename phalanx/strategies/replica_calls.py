"""Calls of a model's methods, sent from an interactive session to the replicas that serve it.

A call is sent as pickles, over the job's authenticated links: its arguments by value, and the model, as a copy of
`model_copies`, only if the serving replicas do not have it yet. Layers of the model in the arguments, such as the model
of a callback, are sent as references.
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
from phalanx.keras_compat.copies.model_copies import LayerDescription
from phalanx.keras_compat.copies.object_attributes import LayerAttributes
from phalanx.runtime.pickling import dumps_with_references, explain_pickling_errors, loads_with_references
from phalanx.training.call_pickling import ARGUMENT_ADVICE, call_reducer
from phalanx.training.model_dispatch import has_trainer, policy_of
from phalanx.training.program_effects.program_random_state import encode_random_state
from phalanx.training.training_policy import TrainingPolicy

PURPOSE = "replica-calls"
SERVER = "phalanx.strategies.replica_server"
"""The module that the other replicas run."""
MODELS_KEPT = 8
"""Number of most recently called models whose copies are kept for further calls."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """A method of a model to call. Buffers: `SessionState`, the model if `has_model`, and the arguments.

    Attributes:
        model: Number of the model in the session, which distinguishes models with equal descriptions.
        has_model: Whether the model is sent too.
        arguments: Names of the arguments.
    """

    method: str
    model: int
    has_model: bool
    arguments: list[str]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The call was unpacked, and begins."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The method has returned."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The call raised the error in the buffer; see `function_call.CallRaised`."""


class FailureConfirmed(msgspec.Struct, frozen=True, tag=True):
    """All replicas raised the same kind of error, so none waits for another, and the next call may follow."""


Message = Call | Ready | Done | Failed | FailureConfirmed


class StrategyModel(NamedTuple):
    """A model, and the settings of its strategy."""

    copy: LayerDescription
    policy: TrainingPolicy
    cross_device_ops: CrossDeviceOps | None


class PackedCall(NamedTuple):
    """A call in the form in which it is sent.

    Attributes:
        strategy_model: The model, which is sent if the replicas do not have it yet.
        digest: Digest of the model without its built state, compared with the one that the replicas have.
        arguments: Pickled arguments, by name.
        has_compiled_functions: See `SessionState`.
    """

    method: str
    strategy_model: StrategyModel
    digest: bytes
    arguments: dict[str, bytes]
    has_compiled_functions: bool


Entry = TypeVar("Entry")


class RecentModels(OrderedDict[int, Entry]):
    """Records of the most recently called models, by number; at most MODELS_KEPT.

    The session and each replica keep one and update it identically, so the session knows the replicas' models.
    """

    def record(self, number: int, entry: Entry) -> None:
        """Record a model as the most recently called one."""
        self[number] = entry
        self.move_to_end(number)
        while len(self) > MODELS_KEPT:
            self.popitem(last=False)


class SessionState(NamedTuple):
    """State of the program, other than the arguments, that a call depends on.

    Attributes:
        attributes: Attributes of the model, which may have changed since the replicas created their copies.
        has_compiled_functions: Whether the model has compiled functions here. They keep old attributes, as the copies'
            must.
    """

    path: list[str]
    settings: KerasSettings
    attributes: tuple[LayerAttributes, ...]
    has_compiled_functions: bool
    random: bytes


def pack(
    model: Any,
    method: str,
    arguments: Mapping[str, Any],
    cross_device_ops: CrossDeviceOps | None,
    tensors: Tensors,
) -> PackedCall:
    """Pack a call to be sent.

    Raises: UnsupportedError naming what cannot be sent.
    """
    strategy_model = StrategyModel(model_copies.describe_layer(model), policy_of(model), cross_device_ops)
    # Without built state: the call that built the model here also built the copies of the others.
    unbuilt = pack_model(strategy_model._replace(copy=strategy_model.copy.unbuilt()), tensors)
    layer_indices = {id(layer): number for number, layer in enumerate(model._flatten_layers())}
    pickles = {
        name: _pickled(value, f"{method}({name}=...)", tensors, layer_indices)
        for name, value in arguments.items()
        if value is not None
    }
    return PackedCall(method, strategy_model, hashlib.sha256(unbuilt).digest(), pickles, has_trainer(model))


def pack_model(strategy_model: StrategyModel, tensors: Tensors) -> bytes:
    """Pickle a model to be sent. Raises: UnsupportedError if it cannot be sent."""
    return _pickled(strategy_model, "The model", tensors, {})


def session_state(call: PackedCall) -> bytes:
    attributes = call.strategy_model.copy.attributes
    return pickle.dumps(
        SessionState(list(sys.path), keras_settings(), attributes, call.has_compiled_functions, encode_random_state())
    )


def unpack_arguments(contents: Mapping[str, memoryview], model: Any) -> dict[str, Any]:
    """Unpickle the arguments of a call, with this process's model in place of the caller's."""
    layers = list(model._flatten_layers())
    return {name: loads_with_references(content, layers.__getitem__) for name, content in contents.items()}


def _pickled(thing: Any, what: str, tensors: Tensors, layer_indices: Mapping[int, int]) -> bytes:
    """
    Args:
        what: Name of the object in errors.
        layer_indices: Indices of the layers that the other replicas have, by id; other layers are sent with their
            weights.
    """
    with explain_pickling_errors(
        f"{what} cannot travel to the other replicas of this session",
        f"{ARGUMENT_ADVICE}, or put the training into a function and call phalanx.launch(function, workers=N).",
    ):
        reduce = call_reducer(tensors, with_weights=bool(layer_indices))
        return dumps_with_references(thing, lambda each: layer_indices.get(id(each)), reduce)
