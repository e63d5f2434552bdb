"""The state of a model between the steps of a loop on JAX.

It is passed as arguments and results of compiled functions. Meanwhile, the model's variables are empty, as in Keras's
own loop. Keras's convention holds: `model._jax_state` has the newest values, and `model._jax_state_synced` says whether
they are in the variables. When a callback touches `self.model`, Keras puts them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.engines.engine import ModelValues
from phalanx.keras_compat.patching import set_untracked

Array = np.ndarray[Any, Any]
Values = list[Any]


def _copy_to_device(array: Any, value: Array) -> Any:
    return jnp.array(value)  # a copy: steps may donate it


class ModelArguments(ModelValues):
    """The values of a model's variables, as arguments for the next step; see `ModelValues`.

    Args:
        fetch: Copies an array into host memory.
        put_like: Copies a value to the location of the array that it replaces.
    """

    def __init__(
        self,
        model: Any,
        fetch: Callable[[Any], Array] = np.array,
        put_like: Callable[[Any, Array], Any] = _copy_to_device,
    ) -> None:
        self._model = model
        self._fetch = fetch
        self._put_like = put_like
        # By id of the variable; see `_place`. Rebuilt in each epoch, because a program may change what is trainable.
        self._places: dict[int, tuple[int, int]] = {}

    @property
    def variables_are_current(self) -> bool:
        return bool(self._model._jax_state_synced)

    def begin(self) -> None:
        self._model._jax_state_synced = True
        self._places = {}

    def end(self) -> None:
        self._model.jax_state_sync()
        self._model._jax_state = None

    def get(self, *, with_optimizer: bool) -> tuple[Values, Values, Any, Values]:
        """Return the values of trainable, non-trainable, optimizer (None without) and metric variables."""
        model = self._model
        kept = getattr(model, "_jax_state", None)
        # In the first step, or after Keras has put the state into the variables for a callback, these have the newest
        # values.
        if model._jax_state_synced or not kept:
            values = model._get_jax_state(
                trainable_variables=True,
                non_trainable_variables=True,
                optimizer_variables=with_optimizer,
                metrics_variables=True,
                purge_model_variables=True,
            )
            optimizer = values[2] if with_optimizer else None
            metrics = _without_aliases(values[-1])
            self.keep(values[0], values[1], optimizer, metrics)
            return values[0], list(values[1]), optimizer, metrics
        return (
            kept["trainable_variables"],
            list(kept["non_trainable_variables"]),
            kept.get("optimizer_variables"),
            kept["metrics_variables"],
        )

    def keep(self, trainable: Values, non_trainable: Values, optimizer: Any, metrics: Values) -> None:
        """Keep what a step returned. `optimizer` is None if the step did not have its values, so has not changed
        them."""
        state = {
            "trainable_variables": trainable,
            "non_trainable_variables": non_trainable,
            "metrics_variables": metrics,
        }
        # A step without the optimizer (a test during `fit`) must not lose the optimizer state of the training.
        if optimizer is None and not self._model._jax_state_synced:
            optimizer = (getattr(self._model, "_jax_state", None) or {}).get("optimizer_variables")
        if optimizer is not None:
            state["optimizer_variables"] = optimizer
        set_untracked(self._model, _jax_state=state, _jax_state_synced=False)

    def read(self, variables: Sequence[Any]) -> list[Array]:
        if self.variables_are_current:
            return [self._fetch(variable.value) for variable in variables]
        lists = self._lists()
        return [self._fetch(lists[kind][index]) for kind, index in map(self._place, variables)]

    def write(self, variables: Sequence[Any], values: Sequence[Array]) -> None:
        if self.variables_are_current:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            return
        lists = list(map(list, self._lists()))
        for (kind, index), value in zip(map(self._place, variables), values, strict=True):
            lists[kind][index] = self._put_like(lists[kind][index], value)
        trainable, non_trainable, optimizer, metrics = lists
        self.keep(trainable, non_trainable, optimizer or None, metrics)

    def _lists(self) -> tuple[Values, Values, Values, Values]:
        kept = self._model._jax_state
        return (
            kept["trainable_variables"],
            kept["non_trainable_variables"],
            kept.get("optimizer_variables") or [],
            kept["metrics_variables"],
        )

    def _place(self, variable: Any) -> tuple[int, int]:
        """Return which of `_lists` a variable is in, and its index there."""
        if not self._places:
            model = self._model
            optimizer = getattr(model, "optimizer", None)  # None before `compile`
            of_optimizer = () if optimizer is None else optimizer.variables
            kinds = (
                model.trainable_variables,
                model.non_trainable_variables,
                of_optimizer,
                model.metrics_variables,
            )
            self._places = {id(v): (kind, n) for kind, variables in enumerate(kinds) for n, v in enumerate(variables)}
        return self._places[id(variable)]


def _without_aliases(values: Values) -> Values:
    """Copy values that occur twice, since a step may not donate an array twice. A model's `metrics` may include a
    metric that Keras includes as well."""
    seen: set[int] = set()
    found = []
    for value in values:
        found.append(jnp.copy(value) if id(value) in seen else value)
        seen.add(id(value))
    return found
