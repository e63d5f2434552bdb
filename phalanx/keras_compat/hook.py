"""The one place where Keras is changed.

`install()` puts dispatchers before a few methods of Keras's trainer class; `uninstall()` takes them out. A model
made or compiled inside `strategy.scope()` carries its strategy's member of the job, and its `fit`, `evaluate`, ...
go to a `ReplicaTrainer` or a `ParameterServerTrainer`; every other model goes on to Keras as if nothing were there. An optimizer
applied inside `strategy.run` merges its gradients first; a synchronized batch normalization asks the other replicas.
A session of a `Supervisor` accompanies the `fit` of its model (`replaced`). Another interface may choose the function
of a step (`choose_train_function`). Layers, optimizers and metrics made in the scope of parameter servers are named,
so that tasks can speak of them.

Tested with Keras 3.15. On 3.12 (JAX) the training scenarios of CI hold as well, but for two results that Keras itself
has changed since: the metrics of `train_on_batch`, and the names of the logs of an own `test_step`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from phalanx.engines.global_batch_norm import synchronizing
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import model_state
from phalanx.training import callback_list
from phalanx.training.central_storage_trainer import CentralStorageTrainer, CentralStorageWorker
from phalanx.training.fit_resumption import has_checkpoint
from phalanx.training.parameter_server_trainer import ParameterServerTrainer
from phalanx.training.parameter_server_worker import ParameterServerWorker
from phalanx.training.replica import Replica, alone
from phalanx.training.replica_trainer import ReplicaTrainer
from phalanx.training.scope_registry import KINDS
from phalanx.training.training_policy import EVERY_STEP, TrainingPolicy

logger = logging.getLogger(__name__)

_DISPATCHED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_STEPS = {"fit": "train", "evaluate": "test"}  # of other methods the first word says it
_MARK = "_phalanx_replica"
_POLICY = "_phalanx_policy"
_TRAINER = "_phalanx_trainer"

Member = Replica | ParameterServerWorker
"""What a model belongs to: this process's place among replicas, or among parameter servers."""

_originals: dict[tuple[type, str], Any] = {}
_plain: dict[str, Any] = {}  # Keras's own methods, of those that are dispatched
_current_member: Callable[[], Member | None]
_merge_gradients: Callable[[list[Any]], list[Any]]
_current_policy: Callable[[], TrainingPolicy]
_choose_train_function: Callable[[Any, Callable[[], None]], Callable[..., Any] | None]
_applying = threading.local()


def install(
    current_member: Callable[[], Member | None],
    merge_gradients: Callable[[list[Any]], list[Any]],
    current_policy: Callable[[], TrainingPolicy] = lambda: EVERY_STEP,
) -> None:
    """Put the dispatchers in; safe to call again.

    Args:
        current_member: names what models belong to which are made or compiled now.
        merge_gradients: merges the gradients of an optimizer applied now over the replicas, or returns them as they
            are where there is nothing to merge.
        current_policy: names how such models are to be trained.
    """
    global _current_member, _merge_gradients, _current_policy
    _current_member, _merge_gradients, _current_policy = current_member, merge_gradients, current_policy
    if _plain:
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
    for name, suffixes in (("save", (".keras", ".h5", ".hdf5")), ("save_weights", (".weights.h5",))):
        _replace(keras.Model, name, _writing_whole(getattr(keras.Model, name), suffixes))
    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        owner = next(base for base in optimizer.__mro__ if "apply" in vars(base))
        _replace(owner, "apply", _merging(owner.apply))
    normalization = keras.layers.BatchNormalization
    _replace(normalization, "_moments", synchronizing(normalization._moments))
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
    _plain.clear()


def member_of(model: Any) -> Member | None:
    """What a model belongs to, or None if it is Keras's own."""
    member: Member | None = vars(model).get(_MARK)
    return member


def is_server_worker(model: Any) -> bool:
    """Whether parameter servers train the model."""
    return isinstance(member_of(model), ParameterServerWorker)


def ask_all_to_stop(model: Any) -> None:
    """In `fit` among parameter servers, where the chief alone decides: have it stop with the epoch. Replicas agree on
    `model.stop_training` anyhow."""
    trainer = vars(model).get(_TRAINER)
    if isinstance(trainer, ParameterServerTrainer | CentralStorageTrainer):
        trainer.request_stop()


def synchronise_variables(model: Any) -> None:
    """Put the state that a loop of JAX has among its arguments into the model's variables."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def bring_up_to_date(model: Any) -> None:
    """Put what a callback may save now into the model's variables: weights and optimizer state of one step, which
    during `fit` JAX has among its arguments, and parameter servers on those; these also while a coordinator's functions
    run."""
    synchronise_variables(model)
    member, trainer = member_of(model), vars(model).get(_TRAINER)
    if isinstance(trainer, ParameterServerTrainer | CentralStorageTrainer):
        trainer.pull_consistent()
    if isinstance(member, ParameterServerWorker) and member.is_chief and member.coordinator is not None:
        member.coordinator.refresh()


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
            vars(self)[_POLICY] = _current_policy()
        vars(self).pop(_TRAINER, None)
        return result

    return method


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `__init__`: name what is made, as the other tasks name theirs."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        member = _current_member()
        if isinstance(member, ParameterServerWorker):
            member.made.note(self)

    # Keras looks at it to write an object's configuration, and does not follow `__wrapped__`.
    vars(method)["__signature__"] = inspect.signature(original)
    return method


def choose_train_function(choose: Callable[[Any, Callable[[], None]], Callable[..., Any] | None]) -> None:
    """Let the functions with which Keras's own `fit` makes its steps be chosen by the caller; safe to call again.

    Args:
        choose: gets the model and what makes Keras's own function, and returns the function to use; None for Keras's.
    """
    global _choose_train_function
    _choose_train_function = choose
    trainer = _trainer_class()
    if (trainer, "make_train_function") not in _originals:
        _replace(trainer, "make_train_function", _choosing(trainer.make_train_function))


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
        is_alone = member is None or (isinstance(member, Replica) and _trains_alone(self, member))
        if is_alone and original.__name__ != "fit":
            return original(self, *args, **kwargs)
        if isinstance(member, Replica) and callback_list.runs_on_this_rank_only():
            if original.__name__ in ("fit", "train_on_batch"):
                raise UnsupportedError(
                    f"{original.__name__}() was called in a callback that only the chief runs, as it derives from one "
                    f"of Keras's that write files (derive it from keras.callbacks.Callback, which runs on every rank), "
                    f"or where a worker that joins a running fit() begins its callbacks."
                )
            return original(self, *args, **kwargs)
        try:
            arguments = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}.{original.__name__}(): {error}") from None
        if is_alone and not has_checkpoint(arguments.get("callbacks")):
            return original(self, *args, **kwargs)
        member = member or alone()
        del arguments[next(iter(signature.parameters))]
        arguments.update(arguments.pop("kwargs", {}))
        _refuse_own_functions(self, member, original.__name__, validates=arguments.get("validation_data") is not None)
        return getattr(_trainer_of(self, member), original.__name__)(**arguments)

    return method


def _writing_whole(original: Callable[..., Any], suffixes: tuple[str, ...]) -> Callable[..., Any]:
    """Around `save` and `save_weights`: all tasks of a job may write the same file at once, and read it again. Where
    somebody is asked before a file is overwritten, only the chief asks.

    Args:
        suffixes: of the files' names.
    """

    @functools.wraps(original)
    def method(self: Any, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        member = member_of(self)
        if isinstance(member, Replica) and member.is_candidate and os.path.exists(filepath):
            logger.warning("%s is left as it is: this worker came late, and may not have what others saved.", filepath)
            return None
        if member is not None and not overwrite and not member.is_chief and os.path.exists(filepath):
            logger.warning("%s is there, and left as it is: only the chief asks whether to overwrite it.", filepath)
            return None
        special = member is None or not overwrite or args or kwargs
        place = None if special else _single_file(filepath, suffixes)
        if place is None:
            return original(self, filepath, overwrite, *args, **kwargs)
        suffix = next(suffix for suffix in suffixes if str(filepath).endswith(suffix))
        temporary = place.with_name(f".{uuid.uuid4().hex}{suffix}")
        try:
            result = original(self, temporary)
            os.replace(temporary, place)
        finally:
            temporary.unlink(missing_ok=True)
        return result

    return method


def _single_file(filepath: Any, suffixes: tuple[str, ...]) -> Path | None:
    """The file that is written whole; None where several are, or none of this file system."""
    if not isinstance(filepath, str | os.PathLike) or "://" in str(filepath):
        return None
    place = Path(os.path.realpath(filepath))
    return place if str(filepath).endswith(suffixes) and place.parent.is_dir() and not place.is_dir() else None


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `make_train_function`: ask first whose function it shall be."""

    @functools.wraps(original)
    def method(self: Any, force: bool = False) -> Any:
        if self.train_function is not None and not force:
            return self.train_function
        chosen = _choose_train_function(self, lambda: original(self, True))
        if chosen is None:
            return original(self, force)
        self.train_function = chosen
        return chosen

    return method


def _merging(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `optimizer.apply`: merge first. An optimizer around another (loss scaling) merges for both."""

    @functools.wraps(original)
    def method(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if getattr(_applying, "now", False):
            return original(self, grads, trainable_variables)
        _applying.now = True
        try:
            merge = model_state.stray_merge()
            if merge is not None:
                weights = list(self._trainable_variables if trainable_variables is None else trainable_variables)
                return original(self, merge(list(grads), weights), weights)
            return original(self, _merge_gradients(list(grads)), trainable_variables)
        finally:
            _applying.now = False

    return method


def _refuse_own_functions(model: Any, member: Member, method: str, *, validates: bool) -> None:
    """Raise UnsupportedError if the model makes the functions itself in which Keras takes its steps: the trainers of a
    job take the steps, in functions of their own. Parameter servers leave evaluation and prediction to Keras."""
    steps = [_STEPS.get(method, method.partition("_")[0]), *(["test"] if validates else [])]
    for step in [step for step in steps if step == "train" or isinstance(member, Replica)]:
        name = f"make_{step}_function"
        if name in vars(model) or getattr(type(model), name) is not getattr(_trainer_class(), name):
            raise UnsupportedError(
                f"{method}() of {model.name!r}: the model has its own {name}(), which only Keras in one process calls. "
                f"Say what a step does in {step}_step(), compute_loss() or call(), or train in a loop of your own."
            )
    if validates and isinstance(member, Replica) and type(model).evaluate is not _trainer_class().evaluate:
        raise UnsupportedError(
            f"fit() of {model.name!r} with validation data: the model has its own evaluate(), by which only Keras in "
            f"one process validates. Say what is computed in test_step() or compute_metrics(), or call evaluate() in a "
            f"callback."
        )


def _trains_alone(model: Any, replica: Replica) -> bool:
    """Whether Keras itself trains the model: no other replica, and nothing done but what Keras does."""
    return replica.is_alone and vars(model)[_POLICY].period is None


def _trainer_of(model: Any, member: Member) -> ReplicaTrainer | ParameterServerTrainer | CentralStorageTrainer:
    trainer: ReplicaTrainer | ParameterServerTrainer | CentralStorageTrainer | None = vars(model).get(_TRAINER)
    if trainer is None:
        if isinstance(member, Replica):
            trainer = ReplicaTrainer(model, member, vars(model).get(_POLICY, EVERY_STEP))
        elif isinstance(member, CentralStorageWorker):
            trainer = CentralStorageTrainer(model, member, lambda name: functools.partial(_plain[name], model))
        else:
            trainer = ParameterServerTrainer(model, member, lambda name: functools.partial(_plain[name], model))
        vars(model)[_TRAINER] = trainer
    return trainer
