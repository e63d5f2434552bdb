"""The one place where Keras is changed.

`install()` puts dispatchers before a few methods of Keras's trainer class; `uninstall()` takes them out. A model
made or compiled inside `strategy.scope()` carries its strategy's member of the job, and its `fit`, `evaluate`, ...
go to a `ReplicaTrainer` or a `ServerTrainer`; every other model goes on to Keras as if nothing were there. An optimizer
applied inside `strategy.run` merges its gradients first.

Tested with Keras 3.15. On 3.12 (JAX) the training scenarios of CI hold as well, but for two results that Keras itself
has changed since: the metrics of `train_on_batch`, and the names of the logs of an own `test_step`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import keras

from phalanx.training.central import CentralTrainer, CentralWorker
from phalanx.training.loop import ReplicaTrainer
from phalanx.training.replica import Replica
from phalanx.training.server_loop import ServerTrainer
from phalanx.training.server_worker import ServerWorker

_DISPATCHED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_MARK = "_phalanx_replica"
_TRAINER = "_phalanx_trainer"

Member = Replica | ServerWorker
"""What a model belongs to: this process's place among replicas, or among parameter servers."""

_originals: dict[tuple[type, str], Any] = {}
_plain: dict[str, Any] = {}  # Keras's own methods, of those that are dispatched
_current_member: Callable[[], Member | None]
_merge_gradients: Callable[[list[Any]], list[Any]]
_applying = threading.local()


def install(current_member: Callable[[], Member | None], merge_gradients: Callable[[list[Any]], list[Any]]) -> None:
    """Put the dispatchers in; safe to call again.

    Args:
        current_member: names what models belong to which are made or compiled now.
        merge_gradients: merges the gradients of an optimizer applied now over the replicas, or returns them as they
            are where there is nothing to merge.
    """
    global _current_member, _merge_gradients
    _current_member, _merge_gradients = current_member, merge_gradients
    if _originals:
        return
    trainer = _trainer_class()
    _replace(trainer, "__init__", _marking(trainer.__init__))
    # Where it is defined: a `compile` that differs from the base trainer's tells Keras that a model has its own, and
    # then `load_model` would not compile it.
    owner = next(base for base in trainer.__mro__ if "compile" in vars(base))
    _replace(owner, "compile", _marking(owner.compile))
    for name in _DISPATCHED:
        _plain[name] = getattr(trainer, name)
        _replace(trainer, name, _dispatching(_plain[name]))
    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        owner = next(base for base in optimizer.__mro__ if "apply" in vars(base))
        _replace(owner, "apply", _merging(owner.apply))


def uninstall() -> None:
    """Give Keras its own methods back; safe to call twice."""
    for (owner, name), original in _originals.items():
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _originals.clear()


def member_of(model: Any) -> Member | None:
    """What a model belongs to, or None if it is Keras's own."""
    member: Member | None = vars(model).get(_MARK)
    return member


def _trainer_class() -> Any:
    """Keras's trainer of the present backend, from which `keras.Model` inherits `fit`."""
    return next(base for base in keras.Model.__mro__ if "fit" in vars(base) and base is not keras.Model)


def _replace(owner: type, name: str, replacement: Any) -> None:
    _originals[owner, name] = vars(owner).get(name)
    setattr(owner, name, replacement)


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `__init__` and `compile`: note the current strategy's member, and that any former trainer is stale."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        member = _current_member()
        if member is not None:
            vars(self)[_MARK] = member
        vars(self).pop(_TRAINER, None)
        return result

    return method


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `fit` and its kin: to the model's trainer if it belongs to a job of several processes."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        member = member_of(self)
        if member is None or (isinstance(member, Replica) and member.world_size == 1):
            return original(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments[next(iter(signature.parameters))]
        arguments.update(arguments.pop("kwargs", {}))
        return getattr(_trainer_of(self, member), original.__name__)(**arguments)

    return method


def _merging(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `optimizer.apply`: merge first. An optimizer around another (loss scaling) merges for both."""

    @functools.wraps(original)
    def method(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if getattr(_applying, "now", False):
            return original(self, grads, trainable_variables)
        _applying.now = True
        try:
            return original(self, _merge_gradients(list(grads)), trainable_variables)
        finally:
            _applying.now = False

    return method


def _trainer_of(model: Any, member: Member) -> ReplicaTrainer | ServerTrainer:
    trainer: ReplicaTrainer | ServerTrainer | None = vars(model).get(_TRAINER)
    if trainer is None:
        if isinstance(member, Replica):
            trainer = ReplicaTrainer(model, member)
        elif isinstance(member, CentralWorker):
            trainer = CentralTrainer(model, member, lambda name: functools.partial(_plain[name], model))
        else:
            trainer = ServerTrainer(model, member, lambda name: functools.partial(_plain[name], model))
        vars(model)[_TRAINER] = trainer
    return trainer
