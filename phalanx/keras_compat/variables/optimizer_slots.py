"""Which optimizer variable belongs to which model variable, as recorded in `add_variable_from_reference`.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.copies.object_config import clone_from_config
from phalanx.keras_compat.model_state import PLAIN
from phalanx.keras_compat.patching import overridden_methods


class OptimizerSlot(NamedTuple):
    """The role of one of an optimizer's variables.

    Attributes:
        variable: Index of the model's variable that it belongs to; -1 for none.
        name: Name of the slot, such as "momentum".
    """

    variable: int
    name: str


def build_and_record_slots(optimizer: Any, variables: Sequence[Any]) -> tuple[OptimizerSlot, ...]:
    """Build a fresh optimizer for variables, and return the slot of each of its own variables."""
    found: dict[int, OptimizerSlot] = {}
    index_of = {id(variable): index for index, variable in enumerate(variables)}
    add = optimizer.add_variable_from_reference

    def add_and_record(reference_variable: Any, name: str | None = None, **options: Any) -> Any:
        added = add(reference_variable, name=name, **options)
        found[id(added)] = OptimizerSlot(index_of[id(reference_variable)], name or "var")
        return added

    with overridden_methods(optimizer, add_variable_from_reference=add_and_record):
        optimizer.build(variables)
    # Keras numbers unnamed variables (Nadam has one) across the whole process.
    slots = [
        found.get(id(variable), OptimizerSlot(-1, re.sub(r"^variable_\d+$", "variable", variable.name)))
        for variable in optimizer.variables
    ]
    # A custom optimizer may give several variables the same name.
    times: Counter[OptimizerSlot] = Counter()
    for place, slot in enumerate(slots):
        times[slot] += 1
        if times[slot] > 1:
            slots[place] = slot._replace(name=f"{slot.name}#{times[slot]}")
    return tuple(slots)


def slots_of_model(optimizer: Any, variables: Sequence[Any]) -> tuple[OptimizerSlot, ...]:
    """Return the slot of each variable of a built optimizer, determined on a clone of it.

    Raises: UnsupportedError if Keras cannot create another optimizer like this one from its config.
    """
    kind = type(optimizer)
    try:
        clone = clone_from_config(optimizer)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"Servers run the optimizer, and Keras cannot create another {kind.__name__} from its config. Give custom "
            f"optimizers and learning-rate schedules a get_config() that returns all arguments of __init__, and "
            f"register their classes with @keras.saving.register_keras_serializable() before you create the strategy. "
            f"({type(error).__name__}: {error})"
        ) from error
    slots = build_and_record_slots(clone, variables)
    # Keras cannot tell whether a `get_config` is complete, so the attributes of the clone and of the original are
    # compared.
    missing = [name for name, value in plain_settings(optimizer).items() if vars(clone).get(name, value) != value]
    if missing:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.get_config() leaves out {', '.join(f'`{name}`' for name in missing)}, so "
            f"the servers would train with another value. Return it there, and take it in __init__."
        )
    return slots


def check_methods(optimizer: Any) -> None:
    """Raise UnsupportedError if the optimizer has methods that its class does not have."""
    kind = type(optimizer)
    own = sorted(name for name in vars(optimizer) if callable(getattr(kind, name, None)))
    if own:
        raise UnsupportedError(
            f"The program has replaced {', '.join(own)} of one {kind.__name__} object, and servers, which run the "
            f"optimizer, do not see that. Override it in a subclass."
        )


def set_decaying(optimizer: Any, decays: Sequence[bool], variables: Sequence[Any]) -> None:
    """Choose the variables to which an optimizer applies its weight decay, with one flag for each."""
    key = optimizer._var_key  # TensorFlow's optimizers pass TensorFlow's variables instead of Keras's
    decaying = {key(variable): flag for variable, flag in zip(variables, decays, strict=True)}
    vars(optimizer)["_use_weight_decay"] = lambda variable: decaying[key(variable)]
    if not any(decays):
        optimizer.weight_decay = None  # Keras on PyTorch fails if there is nothing to decay


def plain_settings(optimizer: Any) -> dict[str, Any]:
    """Return the hyperparameters of an optimizer that are plain values, by attribute name."""
    return {k: v for k, v in vars(optimizer).items() if type(v) in PLAIN and not k.startswith("_") and k != "built"}
