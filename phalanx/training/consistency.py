"""What `fit` and `compile` were told on each rank: gradients of two losses, or two kinds of updates, make no model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from phalanx.errors import DisagreementError
from phalanx.keras_compat.model_state import optimizers
from phalanx.keras_compat.object_config import configuration_of
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.joint_batches import tell_method
from phalanx.training.replica import Replica

_PLAIN = (bool, int, float, str, type(None))
_NOT_COMPARED = ("name", "learning_rate")
"""Of a configuration: Keras numbers names, and the learning rate is the chief's."""


def check_same_configuration(model: Any, call: FitArguments, replica: Replica) -> None:
    """Raise DisagreementError on every rank if `fit` or `compile` were called otherwise on one of them."""
    own = json.dumps(_facts(model, call))
    facts = [json.loads(text) for text in tell_method(replica, "fit", own)]
    for rank, others in enumerate(facts):
        for key in dict.fromkeys(itertools.chain(facts[0], others)):
            if (first := facts[0].get(key)) != (other := others.get(key)):
                raise DisagreementError(
                    f"The ranks were told different things: {key} is {first} on rank 0, and {other} on rank {rank}. "
                    f"The same program, with the same arguments, must run on every rank."
                )


def _facts(model: Any, call: FitArguments) -> dict[str, str]:
    facts: dict[str, Any] = {
        "epochs of fit()": call.epochs,
        "validation data of fit()": "given" if call.validation_data is not None else "not given",
        "validation_freq of fit()": call.validation_freq,
    }
    loss, metrics = getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None)
    if loss is not None:
        facts |= {"loss": loss._user_loss, "loss_weights": loss._user_loss_weights}
    if metrics is not None:
        facts |= {"metrics": metrics._user_metrics, "weighted_metrics": metrics._user_weighted_metrics}
    facts["optimizer"] = [type(optimizer).__name__ for optimizer in optimizers(model)]
    for number, optimizer in enumerate(optimizers(model)):
        kind = type(optimizer).__name__ if number == 0 else f"{type(optimizer).__name__} ({number + 1})"
        facts |= {f"{name} of {kind}": value for name, value in _settings(optimizer).items()}
    return {name: _described(value) for name, value in facts.items()}


def _settings(thing: Any) -> dict[str, Any]:
    """The plain values among those that an object of Keras was made with; none, if it does not tell."""
    try:
        told = configuration_of(thing)
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return {}
    return {k: v for k, v in told.items() if isinstance(v, _PLAIN) and k not in _NOT_COMPARED}


def _described(thing: Any) -> str:
    """The same text on all ranks for the same thing: no addresses, and no order that Python draws anew."""
    if isinstance(thing, _PLAIN):
        return repr(thing)
    if isinstance(thing, Mapping):
        return "{" + ", ".join(f"{name!r}: {_described(value)}" for name, value in thing.items()) + "}"
    if isinstance(thing, list | tuple):
        return "[" + ", ".join(map(_described, thing)) + "]"
    if hasattr(thing, "get_config"):
        settings = ", ".join(f"{name}={value!r}" for name, value in _settings(thing).items())
        return f"{type(thing).__name__}({settings})"
    return str(getattr(thing, "__name__", type(thing).__name__))
