"""Calls of a model's methods that travel from an interactive session to the replicas that serve it.

A call travels as a pickle, over the job's authenticated links: its arguments by value, the model as `model_copies` has
it, and only where the serving replicas do not have it yet. Layers of the model in the arguments, such as the model that
a callback was given, travel as references.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import pickle
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import msgspec

from phalanx.collectives.cross_device_ops import CrossDeviceOps
from phalanx.engines.tensors import Tensors
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import model_copies
from phalanx.keras_compat.callback_bases import OnChief
from phalanx.keras_compat.model_copies import LayerCopy
from phalanx.runtime.pickling import Pickler
from phalanx.strategies.program_random_state import random_state
from phalanx.training.callback_list import runs_on_chief
from phalanx.training.model_dispatch import policy_of
from phalanx.training.training_policy import TrainingPolicy

PURPOSE = "replica-calls"
SERVER = "phalanx.strategies.replica_server"
"""The module that the other replicas run."""
MODELS_KEPT = 8
"""So many of the models that were called last are not made again when they are called again."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """A method of a model to call. The buffers: `SessionState`, the arguments, perhaps the model.

    Attributes:
        model: the digest by which the model is known.
        has_model: whether the model travels too.
    """

    method: str
    model: bytes
    has_model: bool


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The call was understood, and begins."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The method has returned."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It raised the error in the buffer; see `function_call.CallRaised`."""


class Settled(msgspec.Struct, frozen=True, tag=True):
    """All replicas have raised alike, so none waits for another, and the next call may come."""


Message = Call | Ready | Done | Failed | Settled


class PackedCall(NamedTuple):
    """A call as it travels, or may travel if the replicas do not have the model."""

    method: str
    digest: bytes
    model: bytes
    arguments: bytes


class ModelOfStrategy(NamedTuple):
    """A model, and how its strategy trains it."""

    copy: LayerCopy
    policy: TrainingPolicy
    cross_device_ops: CrossDeviceOps | None


class SessionState(NamedTuple):
    """What of the program a call depends on besides its arguments."""

    path: list[str]
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
    what = f"The model {model.name!r}"
    found = ModelOfStrategy(model_copies.copy_of(model), policy_of(model), cross_device_ops)
    content = _pickled(found, what, tensors, {})
    # A copy that the others have is built by the call that has built the model here.
    known_by = _pickled(found._replace(copy=found.copy.unbuilt()), what, tensors, {})
    places = {id(layer): number for number, layer in enumerate(model._flatten_layers())}
    pickles = {
        name: _pickled(value, f"{method}({name}=...)", tensors, places)
        for name, value in arguments.items()
        if value is not None
    }
    return PackedCall(method, hashlib.sha256(known_by).digest(), content, pickle.dumps(pickles))


def program_state() -> bytes:
    return pickle.dumps(SessionState(list(sys.path), random_state()))


def unpack_arguments(content: bytes | memoryview, model: Any) -> dict[str, Any]:
    """The arguments of a call, with this process's model where the caller's was."""
    layers = list(model._flatten_layers())
    return {name: _Unpickler(io.BytesIO(value), layers).load() for name, value in pickle.loads(content).items()}


def _pickled(thing: Any, what: str, tensors: Tensors, places: Mapping[int, int]) -> bytes:
    """
    Args:
        what: names it in errors.
        places: of the layers that the other replicas have, by their ids; others travel with their weights.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, tensors, places)
    try:
        pickler.dump(thing)
    except UnsupportedError:
        raise
    except Exception as error:  # whatever the pickling code of some class raises
        raise UnsupportedError(
            f"{what} cannot travel to the other replicas of this session: {str(error).rstrip('.')}. Pass arrays, a "
            f"keras.utils.PyDataset, a DataLoader or a tf.data.Dataset rather than a running generator, or put the "
            f"training into a function and call phalanx.launch(function, workers=N)."
        ) from error
    return file.getvalue()


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO, tensors: Tensors, places: Mapping[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._places = places

    def persistent_id(self, thing: Any) -> int | None:
        return self._places.get(id(thing))

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, OnChief):
            return OnChief, (thing.create(),)
        if isinstance(thing, keras.callbacks.Callback) and runs_on_chief(thing):
            return copyreg.__newobj__, (type(thing),)  # type: ignore[attr-defined]  # there it is never called
        for reduced in (model_copies.reduced(thing, with_weights=bool(self._places)), self._tensors.reduce(thing)):
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(thing)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, layers: list[Any]) -> None:
        super().__init__(file)
        self._layers = layers

    def persistent_load(self, place: Any) -> Any:
        return self._layers[place]
