"""The entries that Keras writes to a file of weights, as variables: their names without their values.

Keras names them by their position in the model (`layers/dense/vars/0`), not by the names of layers, which count all
layers of a program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.saving import saving_lib

from phalanx.keras_compat.patching import PatchedFunction

_VARIABLES = "vars"


class _EntryStore(saving_lib.NpzIOStore):  # type: ignore[misc]  # Keras accepts only its own stores
    """Keeps in memory what layers and optimizers store, or returns it to them."""

    def __init__(self, contents: dict[str, dict[str, Any]]):
        self.contents = contents

    def make(self, path: str, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self.contents.setdefault(path, {})

    def get(self, path: str) -> dict[str, Any]:
        return self.contents.get(path, {})


def _store_variables(optimizer: Any, store: dict[str, Any]) -> None:
    store.update({str(index): variable for index, variable in enumerate(optimizer.variables)})


# Keras stores the values of an optimizer's variables, which cannot be read if they are in other processes.
_STORING_VARIABLES = PatchedFunction(BaseOptimizer, "save_own_variables", _store_variables)


def weight_entries(model: Any) -> dict[str, Any]:
    """Return the entries of a file of the model's weights: variables, or what layers with a custom format store.

    Raises: ValueError if the model has no variables yet.
    """
    if not model.built:
        raise ValueError("The model is not built: call it on data, or give it an Input.")
    contents: dict[str, dict[str, Any]] = {}
    with _STORING_VARIABLES:
        # Keras's own traversal of the model, so the entries have the names and the order of its files.
        saving_lib._save_state(model, _EntryStore(contents), None, inner_path="", visited_saveables=set())
    return {
        "/".join(filter(None, (path, _VARIABLES, name))): value
        for path, entries in contents.items()
        for name, value in entries.items()
    }


def load_weight_entries(model: Any, entries: Mapping[str, Any]) -> None:
    """Assign values to the model's variables from all of its entries.

    Args:
        entries: Arrays by the names of `weight_entries`.
    """
    contents: dict[str, dict[str, Any]] = {}
    for key, value in entries.items():
        path, _, name = key.rpartition("/")
        contents.setdefault(path.removesuffix(_VARIABLES).rstrip("/"), {})[name] = value
    saving_lib._load_state(model, _EntryStore(contents), None, inner_path="", visited_saveables=set(), error_msgs={})
