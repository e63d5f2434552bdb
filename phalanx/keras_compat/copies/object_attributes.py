"""Attributes that a program sets on its layers, optimizers and metrics, so that copies have them too.

A plain value is sent. Anything else that a program may set (a layer, a function, an array) is only described, and must
be the same in a copy: it is there if `__init__` or `build` sets it. A copy that differs is refused instead of silently
computing something else. Variables and objects of libraries are not compared.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedSet

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.copies.object_names import name_counters, naming_from
from phalanx.keras_compat.program_classes import is_of_program

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_COLLECTIONS: dict[type, type] = {
    **{kind: kind for kind in (list, tuple, dict, set, frozenset)},
    TrackedList: list,
    TrackedDict: dict,
    TrackedSet: set,
}
"""Collections that are sent if their items are plain. In layers, Keras wraps some of them."""
_VALUE_MODULES = ("datetime", "decimal", "fractions", "pathlib", "uuid")
"""Modules of the standard library whose objects are plain values, too."""
_DEPTH = 5
"""Number of levels of nested objects and collections that are examined."""
_SAMPLE = 4096
"""Number of elements of a larger array that are compared."""
_SET_LATER = {
    *("built", "compile", "optimizer", "history", "jit_compile", "run_eagerly", "train_function"),
    *("stop_training", "stop_predicting", "stop_evaluating", "test_function", "predict_function"),
    *("_compile_config", "_compiled_trainable_state", "_eval_epoch_iterator", "_jax_state", "_functional"),
    *("_trainable_variables_indices", "_lock", "_exclude_from_weight_decay_cache", "_exclude_from_weight_decay"),
}
"""Attributes that Keras sets on an object after its construction, or on optimizers and metrics."""
_PREFIXES = ("_phalanx_", "_self_", "_tf_")
_IGNORED = object()


class ValueDescription(NamedTuple):
    """A value that is not sent, described by what it must equal in a copy.

    Attributes:
        what: Description for error messages.
    """

    what: str
    mark: Any


class CustomObject(NamedTuple):
    """The attributes of an object of a custom class that is not a Keras class."""

    kind: str
    attributes: dict[str, Any]


class LayerAttributes(NamedTuple):
    """The name, class and attributes of a layer in a model, or of the model itself."""

    name: str
    kind: str
    attributes: dict[str, Any]


def layer_attributes(root: Any) -> tuple[LayerAttributes, ...]:
    """Return the attributes of a layer and of the layers in it."""
    layers = list(root._flatten_layers())
    numbers = {id(layer): number for number, layer in enumerate(layers)}
    return tuple(
        LayerAttributes(layer.name, type(layer).__qualname__, describe_attributes(layer, numbers)) for layer in layers
    )


def restore_layer_attributes(root: Any, parts: tuple[LayerAttributes, ...]) -> None:
    """Set these attributes on a copy of a layer and on the layers in it.

    Raises: UnsupportedError naming a layer or an attribute that the copy cannot have.
    """
    layers = list(root._flatten_layers())
    for number, part in enumerate(parts):
        if number >= len(layers) or type(layers[number]).__qualname__ != part.kind:
            raise UnsupportedError(
                f"{root.name!r} has the {part.kind} layer {part.name!r}, which a copy in another process does not "
                f"have: __init__ and build do not create it. Create it there, before the first call."
            )
    if len(layers) > len(parts):
        raise UnsupportedError(
            f"{root.name!r} lacks the {type(layers[len(parts)]).__qualname__} layer {layers[len(parts)].name!r}, which "
            f"__init__ creates for a copy in another process."
        )
    numbers = {id(layer): number for number, layer in enumerate(layers)}
    for part, layer in zip(parts, layers, strict=True):
        restore_attributes(layer, part.attributes, numbers, part.name)


def describe_attributes(thing: Any, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Return the attributes of an object that are sent or compared.

    Args:
        numbers: Numbers of the layers that attributes may refer to, by id.
    """
    is_custom = is_of_program(type(thing))
    has_private_collections = not isinstance(thing, keras.layers.Layer)  # Keras keeps private collections of variables
    found = {}
    for name, value in _attributes(thing).items():
        if name in _keras_attribute_names() or name.startswith(_PREFIXES):
            continue
        if name.startswith("_") and (not is_custom or (has_private_collections and type(value) in _COLLECTIONS)):
            continue
        described = _describe(value, numbers, _DEPTH)
        # Keras's layers also keep caches.
        if described is not _IGNORED and (is_custom or not isinstance(described, ValueDescription | CustomObject)):
            found[name] = described
    return found


def restore_attributes(thing: Any, attributes: Mapping[str, Any], numbers: Mapping[int, int], where: str) -> None:
    """Set these attributes on a copy. Raises: UnsupportedError naming one that it cannot have."""
    present = _attributes(thing)
    for name, wanted in attributes.items():
        own = present.get(name, _IGNORED)
        found = own if own is _IGNORED else _describe(own, numbers, _DEPTH)
        if isinstance(wanted, CustomObject) and isinstance(found, CustomObject) and found.kind == wanted.kind:
            restore_attributes(own, wanted.attributes, numbers, f"{where}.{name}")
        elif isinstance(wanted, ValueDescription | CustomObject):
            if found != wanted:
                what = wanted.what if isinstance(wanted, ValueDescription) else f"an object of {wanted.kind}"
                raise UnsupportedError(
                    f"The attribute {name!r} of {where!r} is {what}, and a copy in another process has another value, "
                    f"or none. Set it in __init__, from its arguments; of attributes that are set later, only numbers, "
                    f"strings and collections of them travel."
                )
        elif type(found) is not type(wanted) or found != wanted:
            # Bypasses a frozen dataclass. For layers, `setattr` lets Keras wrap collections.
            (setattr if isinstance(thing, keras.layers.Layer) else object.__setattr__)(thing, name, wanted)


def _attributes(thing: Any) -> dict[str, Any]:
    return {**vars(thing), **(vars(thing).get("_modules") or {})}  # on PyTorch, inner layers are there


def _describe(value: Any, numbers: Mapping[int, int], depth: int) -> Any:
    if type(value) in _PLAIN or isinstance(value, np.generic) or type(value).__module__.split(".")[0] in _VALUE_MODULES:
        return value
    if isinstance(value, keras.layers.Layer):
        return ValueDescription(f"a {type(value).__name__} layer", numbers.get(id(value), type(value).__qualname__))
    if not depth or isinstance(value, keras.optimizers.Optimizer | keras.Variable):
        return _IGNORED
    if isinstance(value, type | BuiltinFunctionType):
        return ValueDescription(value.__qualname__, value.__qualname__)
    if isinstance(value, FunctionType | MethodType):
        return _describe_function(value)
    if isinstance(value, functools.partial):
        return _describe((value.func, value.args, value.keywords), numbers, depth)
    if isinstance(value, list | tuple | set | frozenset | dict | deque):
        return _describe_collection(value, numbers, depth)
    if isinstance(value, np.ndarray) or keras.ops.is_tensor(value):
        return _describe_array(value)
    if isinstance(value, enum.Enum):
        return ValueDescription(str(value), str(value))
    if hasattr(value, "__dict__") and (isinstance(value, SimpleNamespace) or is_of_program(type(value))):
        attributes = {
            name: described
            for name, each in vars(value).items()
            if name not in _SET_LATER and (described := _describe(each, numbers, depth - 1)) is not _IGNORED
        }
        return CustomObject(type(value).__qualname__, attributes)
    return _IGNORED


def _describe_function(function: FunctionType | MethodType) -> Any:
    if (function.__module__ or "").startswith("phalanx."):
        return _IGNORED  # set by Phalanx
    code: CodeType = function.__code__
    # The place of the definition may be lost on the way. Numbers in the function are what changes most often.
    constants = tuple(each for each in code.co_consts if type(each) in _PLAIN)
    return ValueDescription(f"the function {code.co_name}()", (code.co_name, code.co_code, constants))


def _describe_collection(value: Any, numbers: Mapping[int, int], depth: int) -> Any:
    items = list(value.values()) if isinstance(value, dict) else list(value)
    described = [_describe(item, numbers, depth - 1) for item in items]
    known = [each for each in described if each is not _IGNORED]
    if items and not known:
        return _IGNORED
    kind = _COLLECTIONS.get(type(value))
    keys = list(value) if isinstance(value, dict) else []
    is_plain = len(known) == len(items) and not any(isinstance(each, ValueDescription | CustomObject) for each in known)
    if kind is None or not is_plain or any(type(key) not in _PLAIN for key in keys):
        return ValueDescription(f"a {type(value).__name__}", (type(value).__qualname__, list(map(str, keys)), known))
    if kind is dict:
        return dict(zip(keys, known, strict=True))
    # The order of a set has no meaning, and a digest must be the same for the same set.
    return kind(sorted(known, key=repr) if kind in (set, frozenset) else known)


def _describe_array(value: Any) -> Any:
    try:
        array = np.asarray(keras.ops.convert_to_numpy(value))
    except Exception:  # a tensor of a trace
        return _IGNORED
    sample = array.reshape(-1)[:: max(1, array.size // _SAMPLE)]
    content = repr(list(sample)).encode() if array.dtype.hasobject else sample.tobytes()
    mark = (str(array.dtype), array.shape, hashlib.sha256(content).hexdigest())
    return ValueDescription(f"an array of shape {array.shape}", mark)


@functools.cache
def _keras_attribute_names() -> frozenset[str]:
    """Return the names of the attributes that Keras itself sets on layers and models."""
    with naming_from(name_counters()):
        inputs = keras.Input((1,), name="inputs")
        samples: Iterable[Any] = (keras.layers.Layer(name="layer"), keras.Model(inputs, inputs, name="model"))
        return frozenset(_SET_LATER.union(*(vars(sample) for sample in samples)))


def cache_keras_attribute_names() -> None:
    """Cache what `describe_attributes` needs and must not create in a strategy's scope. Safe to call again."""
    _keras_attribute_names()


def plain_attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object that are plain values themselves."""
    return {name: value for name, value in vars(thing).items() if type(value) in _PLAIN}
