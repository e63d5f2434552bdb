"""Switches of a program: whether numbers and flags that its code reads are on, such as the weight of a loss term.

A test of a step cannot judge what the step leaves out. So tests are repeated when something is switched on
(`ProgramProbes.begin_epoch`): a callback raises the weight of a term from zero, an epoch enables an adversary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from phalanx.keras_compat import model_state
from phalanx.keras_compat.variables.host_values import host_copy
from phalanx.training.program_effects.program_objects import ProgramObjects, is_large
from phalanx.training.state_sync import seed_generators

Switches = dict[tuple[int, str], bool]
"""Whether each number or flag is on, by its owner's ID and its name there."""


def find_switches(model: Any) -> Switches:
    """Return all switches that custom layers, steps and losses read: from attributes, closures and global variables.

    Switches are flags, floating-point numbers and variables of one such number; not integers, which count, and not what
    training itself changes.

    Args:
        model: A compiled and built model.
    """
    return {place: is_on for place, value in _values(model) if (is_on := _is_on(value)) is not None}


def zero_switch_variables(model: Any) -> list[Any]:
    """Return the `keras.Variable`s among the switches that are zero."""
    values = [value for _, value in _values(model) if isinstance(value, keras.Variable) and _is_on(value) is False]
    return list({id(value): value for value in values}.values())


def was_switched_on(before: Switches, now: Switches) -> bool:
    """Whether something has been switched on."""
    return any(is_on and before.get(place) is False for place, is_on in now.items())


def _values(model: Any) -> Iterator[tuple[tuple[int, str], Any]]:
    """Yield the values that the program's code reads, with their places."""
    parts = [model, *model_state.custom_layers(model), *model_state.compiled_losses(model)]
    held = ProgramObjects(parts)
    owners = {id(each): each for each in (*parts, *held.objects)}.values()
    trained = {id(variable) for variable in _trained(model)}
    read = [((id(owner), name), value) for owner in owners for name, value in _flattened(vars(owner))]
    read += [(place.key, place.get()) for place in held.variables]
    return ((place, value) for place, value in read if id(value) not in trained)


def _trained(model: Any) -> Iterator[Any]:
    """Yield the variables that every step may change."""
    yield from model.trainable_variables
    yield from model.metrics_variables
    for optimizer in model_state.optimizers(model):
        yield from optimizer.variables
    for generator in seed_generators(model):
        yield generator.state


def _flattened(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, and the items of those that are collections."""
    for name, value in attributes.items():
        yield name, value
        if isinstance(value, dict | list | tuple) and not is_large(value):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}[{key}]", item) for key, item in items)


def _is_on(value: Any) -> bool | None:
    """Return whether a number or flag is nonzero; None for everything else."""
    if isinstance(value, bool | float | np.bool_ | np.floating):
        return bool(value)
    if isinstance(value, keras.Variable):
        return bool(host_copy(value)) if value.shape == () and keras.backend.is_float_dtype(value.dtype) else None
    # Tensors of JAX and TensorFlow are constants of compiled steps, or symbolic; a `tf.Variable` is neither.
    home = type(value).__module__
    if not (home.startswith(("numpy", "torch")) or (home.startswith("tensorflow") and hasattr(value, "assign"))):
        return None
    if getattr(value, "shape", None) != () or "float" not in str(getattr(value, "dtype", "")):
        return None
    return bool(keras.ops.convert_to_numpy(value))
