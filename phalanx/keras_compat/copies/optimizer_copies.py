"""What an optimizer keeps about its model's variables that is not in its configuration.

Uses `_trainable_variables`, `_exclude_from_weight_decay`, `_exclude_from_weight_decay_pattern` and `_var_key`. Tested
with Keras 3.15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras

from phalanx.keras_compat.model_state import inner_optimizer, optimizers


class FormerVariable(NamedTuple):
    """A variable that a model had when its optimizer was built, such as a kernel before `quantize`."""

    shape: tuple[int, ...]
    dtype: str
    name: str


class OptimizerDescription(NamedTuple):
    """One optimizer of a model, as it is sent.

    Attributes:
        built_for: Numbers of the model's variables that it was built for; empty if it is not built.
        undecayed: Numbers of the variables passed to `exclude_from_weight_decay`.
        undecayed_names: Pattern of the names passed to it.
    """

    built_for: tuple[int | FormerVariable, ...]
    undecayed: tuple[int, ...]
    undecayed_names: str | None

    def unbuilt(self) -> OptimizerDescription:
        return self._replace(built_for=())

    def exclude(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make an unbuilt copy exclude the same variables from weight decay as the original."""
        if (self.undecayed or self.undecayed_names) and not optimizer.built:
            names = [self.undecayed_names] if self.undecayed_names else None
            inner_optimizer(optimizer).exclude_from_weight_decay(
                [variables[number] for number in self.undecayed], names
            )

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build a copy for the original's variables. No effect if it is built."""
        if not self.built_for or optimizer.built:
            return
        optimizer.build(
            [
                keras.Variable("zeros", each.shape, each.dtype, name=each.name)
                if isinstance(each, FormerVariable)
                else variables[each]
                for each in self.built_for
            ]
        )


def describe_optimizers(model: Any) -> tuple[OptimizerDescription, ...]:
    """Return the copies of all optimizers of a model."""
    numbers = {id(variable): number for number, variable in enumerate(model.variables)}
    return tuple(_describe_optimizer(optimizer, model.variables, numbers) for optimizer in optimizers(model))


def _describe_optimizer(optimizer: Any, variables: Sequence[Any], numbers: Mapping[int, int]) -> OptimizerDescription:
    inner = inner_optimizer(optimizer)
    excluded = getattr(inner, "_exclude_from_weight_decay", ())
    pattern = getattr(inner, "_exclude_from_weight_decay_pattern", None)
    return OptimizerDescription(
        tuple(_number(variable, numbers) for variable in optimizer._trainable_variables) if optimizer.built else (),
        tuple(number for number, variable in enumerate(variables) if inner._var_key(variable) in excluded),
        None if pattern is None else pattern.pattern,
    )


def _number(variable: Any, numbers: Mapping[int, int]) -> int | FormerVariable:
    number = numbers.get(id(variable))
    return FormerVariable(tuple(variable.shape), variable.dtype, variable.name) if number is None else number
