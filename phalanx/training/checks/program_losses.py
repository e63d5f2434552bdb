"""Losses of a program that are custom code, so that it is unknown how they combine over the parts of a batch."""

from __future__ import annotations

from typing import Any

import keras

from phalanx.keras_compat.model_state import compiled_losses, instance_method, names_in, overrides
from phalanx.keras_compat.patching import defining_class


def unknown_losses(model: Any) -> list[Any]:
    """Return the compiled losses about which nothing is known."""
    if not _calls_model(model):
        return []
    return [loss for loss in compiled_losses(model) if not is_known(loss)]


def is_known(loss: Any) -> bool:
    """Whether a loss computes what Keras's own losses do. A subclass of one of them may compute anything."""
    methods = [defining_class(type(loss), name) for name in ("call", "__call__")]
    computes = [*methods, getattr(loss, "fn", type(loss))]
    homes = [getattr(each, "__module__", None) or "" for each in computes]
    return instance_method(loss, "call") is None and all(home.startswith(("keras.", "phalanx.")) for home in homes)


def _calls_model(model: Any) -> bool:
    """Whether a step calls the model, as far as that is visible; a custom step may do anything with its parts."""
    return not overrides(model, "train_step") or type(model).call is not keras.Model.call


def computes_own_loss(model: Any) -> bool:
    """Whether a step calls a custom `compute_loss`."""
    if not overrides(model, "compute_loss") or not _calls_model(model):
        return False
    is_used = not {"compute_loss", "_compute_loss"}.isdisjoint(names_in(model.train_step))
    return is_used or not overrides(model, "train_step")


def layers_adding_losses(model: Any) -> list[Any]:
    """Return custom layers that add losses."""
    if not _calls_model(model):
        return []
    return [each for each in model._flatten_layers() if _adds_losses(each)]


def _adds_losses(layer: Any) -> bool:
    if "add_loss" in names_in(instance_method(layer, "call")):
        return True
    is_own = not type(layer).__module__.startswith("keras.")
    return is_own and any("add_loss" in _names_of(kind) for kind in type(layer).__mro__)


def _names_of(kind: type) -> set[str]:
    if kind.__module__.startswith(("keras.", "tensorflow.", "torch.")):
        return set()
    return {name for function in vars(kind).values() for name in names_in(function)}
