"""The one place where Keras is changed.

`install()` puts dispatchers before a few methods of Keras's trainer class; `uninstall()` takes them out. A model
made or compiled inside `strategy.scope()` carries its strategy's member of the job, and its `fit`, `evaluate`, ...
go to a `ReplicaTrainer` or a `ServerTrainer`; every other model goes on to Keras as if nothing were there. An optimizer
applied inside `strategy.run` merges its gradients first. A session of a `Supervisor` accompanies the `fit` of its model
(`replaced`). Layers, optimizers and metrics made in the scope of parameter servers are named, so that tasks can speak
of them.

Tested with Keras 3.15. On 3.12 (JAX) the training scenarios of CI hold as well, but for two results that Keras itself
has changed since: the metrics of `train_on_batch`, and the names of the logs of an own `test_step`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from phalanx.training.central import CentralTrainer, CentralWorker
from phalanx.training.loop import ReplicaTrainer
from phalanx.training.made import KINDS
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
    for kind in KINDS:
        owner = next(base for base in kind.__mro__ if "__init__" in vars(base))
        _replace(owner, "__init__", _naming(owner.__init__))


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


def is_server_worker(model: Any) -> bool:
    """Whether parameter servers train the model."""
    return isinstance(member_of(model), ServerWorker)


def synchronise_variables(model: Any) -> None:
    """Put the state that a loop of JAX has among its arguments into the model's variables."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def bring_up_to_date(model: Any) -> None:
    """Put what a callback may save now into the model's variables: weights and optimizer state of one step, which
    during `fit` JAX has among its arguments, and parameter servers on those."""
    synchronise_variables(model)
    trainer = vars(model).get(_TRAINER)
    if isinstance(trainer, ServerTrainer):
        trainer.gather()


@contextmanager
def replaced(model: Any, methods: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> Iterator[None]:
    """While inside, methods of this one model go through functions of the caller's.

    Args:
        methods: by name, what makes the function to be called from the method.
    """
    for name, wrap in methods.items():
        vars(model)[name] = wrap(getattr(model, name))
    try:
        yield
    finally:
        for name in methods:
            del vars(model)[name]


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


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `__init__`: name what is made, as the other tasks name theirs."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        member = _current_member()
        if isinstance(member, ServerWorker):
            member.made.note(self)

    # Keras looks at it to write an object's configuration, and does not follow `__wrapped__`.
    vars(method)["__signature__"] = inspect.signature(original)
    return method


def redirect(optimizer: Any, apply: Callable[[Sequence[Any], Sequence[Any] | None], None]) -> None:
    """Let an optimizer's `apply` (and with it `apply_gradients`, `stateless_apply`) be another's from now on.

    Args:
        apply: gets the gradients, and the variables that were named with them, or None.
    """

    def redirected(grads: Any, trainable_variables: Any = None) -> None:
        apply(list(grads), None if trainable_variables is None else list(trainable_variables))

    vars(optimizer)["apply"] = redirected


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
