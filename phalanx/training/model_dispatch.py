"""Selection of the trainer that runs a model; strategies register it with `phalanx.keras_compat.trainer_hook`.

A model that is constructed or compiled inside `strategy.scope()` belongs to this process's member of the job: its place
among replicas, or among parameter servers. `fit`, `evaluate`, ... of the model are then run by a `ReplicaTrainer` or a
`ParameterServerTrainer`. All other models are left to Keras.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

from phalanx.data import DatasetCreator, DistributedDataset
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import trainer_hook
from phalanx.keras_compat.callback_bases import create_on_chief
from phalanx.keras_compat.keras_internals import keras_trainer
from phalanx.keras_compat.model_state import sync_jax_state
from phalanx.keras_compat.patching import set_untracked
from phalanx.keras_compat.trainer_hook import KerasMethod
from phalanx.runtime.undistributed_fit import OWNER
from phalanx.training import chief_callbacks, shared_saving
from phalanx.training.checks.model_checks import check_server_support
from phalanx.training.fit_resumption import has_checkpoint
from phalanx.training.nested_calls import collective_method
from phalanx.training.program_effects import program_random_state
from phalanx.training.program_effects.per_rank_random_numbers import running_method
from phalanx.training.replica import Replica, divides_batches, single_replica
from phalanx.training.replica_trainer import ReplicaTrainer
from phalanx.training.servers.parameter_server_trainer import ParameterServerTrainer
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.state_sync import preserved_metrics
from phalanx.training.step_examination import is_examined
from phalanx.training.training_policy import EVERY_STEP, TrainingPolicy, on_device

_STEPS = {"fit": "train", "evaluate": "test"}  # the other methods begin with the name of their step
_TRAINER = "_phalanx_trainer"

Member = Replica | ParameterServerWorker
"""Owner of a model: this process's place among replicas, or among parameter servers."""


class ModelOwner(NamedTuple):
    """The part of a strategy that its models' trainers see.

    Attributes:
        member: See `Member`.
        policy: Training policy of its models.
        running: Returns the context in which methods of its models run.
    """

    member: Member
    policy: TrainingPolicy = EVERY_STEP
    running: Callable[[], AbstractContextManager[None]] = nullcontext


class ModelDispatcher:
    """See `phalanx.keras_compat.trainer_hook.KerasDispatcher`.

    Args:
        current_owner: Returns the owner of a model that is constructed or compiled now; None to leave it to Keras.
        merge_gradients: See `KerasDispatcher.merge_gradients`.
        note_variable: Called with each Keras variable that is created.
    """

    def __init__(
        self,
        current_owner: Callable[[], ModelOwner | None],
        merge_gradients: Callable[[list[Any], list[Any]], list[Any]],
        note_variable: Callable[[Any], None] = lambda variable: None,
    ) -> None:
        self._current_owner = current_owner
        self.register_variable = note_variable
        self.merge_gradients = merge_gradients

    def register_model(self, model: Any) -> None:
        """Record the current strategy, and invalidate an earlier trainer.

        Raises: UnsupportedError for a compiled model that parameter servers cannot train.
        """
        if (owner := self._current_owner()) is not None:
            # Called for the constructor and for `compile`: a model created outside the scope may be compiled inside it.
            set_untracked(model, **{OWNER: owner})
        # Engines trace what `compile` received, so a trainer lives as long as one compilation.
        forget_trainer(model)
        if getattr(model, "compiled", False) and isinstance(member_of(model), ParameterServerWorker):
            check_server_support(model)

    def forget_functions(self, model: Any) -> None:
        """Invalidate an earlier trainer, because engines compile functions of the model's variables."""
        forget_trainer(model)

    def register_object(self, thing: Any) -> None:
        """Name a created object, so that tasks can refer to it."""
        owner = self._current_owner()
        if owner is not None and isinstance(owner.member, ParameterServerWorker):
            owner.member.scope_registry.register(thing)

    def run(self, model: Any, method: KerasMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method with the model's trainer, or with Keras if the model trains in this process alone."""
        owner = _owner_of(model)
        with on_device(policy_of(model).device), nullcontext() if owner is None else owner.running():
            return self._run(model, method, args, kwargs)

    def _run(self, model: Any, method: KerasMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        member = member_of(model)
        if method.name in ("fit", "train_on_batch") and isinstance(member, Replica) and is_examined(member):
            return _examine(model, member, method, args, kwargs)
        is_alone = member is None or (isinstance(member, Replica) and _trains_alone(model, member))
        if is_alone and method.name != "fit":
            return _run_by_keras(method, model, *args, **kwargs)
        if isinstance(member, Replica) and chief_callbacks.runs_on_this_rank_only():
            _refuse_training_in_chief_callback(method)
            # The other ranks' metrics continue to count. Logs, and what callbacks decide from them, must stay the same.
            with preserved_metrics(model):
                return _run_by_keras(method, model, *args, **kwargs)
        arguments = method.bind(model, args, kwargs)
        if is_alone and not has_checkpoint(arguments.get("callbacks")):
            return _run_by_keras(method, model, *args, **kwargs)
        # Keras's own `fit` cannot save for a `Checkpoint`; a job of one process can.
        member = member or single_replica()
        if member.is_chief:
            with nullcontext() if is_alone else program_random_state.restored_on_exit():
                create_on_chief(arguments.get("callbacks"))
        _refuse_own_functions(model, member, method.name, validates=arguments.get("validation_data") is not None)
        with _entering(member, model, method.name, arguments):
            return getattr(_trainer_of(model, member), method.name)(**arguments)

    def save(self, model: Any, method: KerasMethod, filepath: Any, overwrite: bool, *args: Any, **kwargs: Any) -> Any:
        """See `shared_saving.save`."""
        member, trainer = member_of(model), vars(model).get(_TRAINER)
        if isinstance(member, ParameterServerWorker) and member.is_chief and trainer is not None:
            # Between two batches the model lacks the servers' optimizer state and some of their updates.
            trainer.pull_consistent()
        return shared_saving.save(model, member, method, filepath, overwrite, *args, **kwargs)


def has_trainer(model: Any) -> bool:
    """Whether a model has been called since it was compiled, so that its trainer may have compiled functions."""
    return _TRAINER in vars(model)


def member_of(model: Any) -> Member | None:
    """Return the member to which a model belongs; None if Keras itself trains it."""
    owner = _owner_of(model)
    return None if owner is None else owner.member


def policy_of(model: Any) -> TrainingPolicy:
    """Return the policy by which a model's strategy trains it."""
    owner = _owner_of(model)
    return EVERY_STEP if owner is None else owner.policy


def _owner_of(model: Any) -> ModelOwner | None:
    owner: ModelOwner | None = vars(model).get(OWNER)
    return owner


def is_server_worker(model: Any) -> bool:
    """Whether parameter servers train the model."""
    return isinstance(member_of(model), ParameterServerWorker)


def request_stop(model: Any) -> None:
    """Stop `fit` on parameter servers, where only the chief decides, at the end of the epoch.

    Replicas need no request: they agree on `model.stop_training`.
    """
    trainer = vars(model).get(_TRAINER)
    if isinstance(trainer, ParameterServerTrainer):
        trainer.request_stop()


def update_variables(model: Any) -> None:
    """Write the newest weights and optimizer state, all of the same step, to the model's variables.

    During `fit`, JAX holds them in the arguments of its functions, and parameter servers hold them themselves, also
    while a coordinator's functions run.
    """
    sync_jax_state(model)
    member, trainer = member_of(model), vars(model).get(_TRAINER)
    if isinstance(trainer, ParameterServerTrainer):
        trainer.pull_consistent()
    if isinstance(member, ParameterServerWorker) and member.is_chief and member.coordinator is not None:
        member.coordinator.refresh()


def _examine(
    model: Any, member: Replica, method: KerasMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NoReturn:
    """Run the program for `phalanx plan`, to measure what its `fit` computes and merges."""
    if method.name != "fit":
        raise UnsupportedError(
            f"`phalanx plan` measures the first fit() of a program, and this one calls {method.name}() before it."
        )
    arguments = method.bind(model, args, kwargs)
    _refuse_own_functions(model, member, method.name, validates=False)
    ReplicaTrainer(model, member, policy_of(model)).examine_fit(**arguments)


def _run_by_keras(method: KerasMethod, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call Keras's own method with datasets that it supports: for `DatasetCreator` the dataset for one process, for a
    distributed dataset the original."""

    def one(value: Any) -> Any:
        if isinstance(value, DistributedDataset):
            return value.original
        return value() if isinstance(value, DatasetCreator) else value

    return method(model, *map(one, args), **{name: one(value) for name, value in kwargs.items()})


def _refuse_training_in_chief_callback(method: KerasMethod) -> None:
    if method.name in ("fit", "train_on_batch"):
        raise UnsupportedError(
            f"{method.name}() was called in a callback that only the chief runs, or where a worker that joins a "
            f"running fit() begins its callbacks. The chief alone runs loggers, Keras's callbacks that write files, "
            f"what derives from these, and what OnChief wraps. A callback that trains must run on every rank: derive "
            f"it from keras.callbacks.Callback."
        )


def _refuse_own_functions(model: Any, member: Member, method: str, *, validates: bool) -> None:
    """Raise UnsupportedError if the model has a custom `make_train_function` or the like.

    The trainers of a job run steps in their own functions. Parameter servers leave evaluation and prediction to Keras.
    """
    steps = [_STEPS.get(method, method.partition("_")[0]), *(["test"] if validates else [])]
    for step in [step for step in steps if step == "train" or isinstance(member, Replica)]:
        name = f"make_{step}_function"
        if name in vars(model) or getattr(type(model), name) is not getattr(keras_trainer(), name):
            raise UnsupportedError(
                f"{method}() of {model.name!r}: the model has its own {name}(), which only Keras in one process calls. "
                f"Say what a step does in {step}_step(), compute_loss() or call(), or train in a custom loop."
            )


@contextmanager
def _entering(member: Member, model: Any, method: str, arguments: dict[str, Any]) -> Iterator[None]:
    """Context of a call of a model's method in which all members take part."""
    if not isinstance(member, Replica):
        with nullcontext() if member.calls is None else member.calls.calling(model, method, arguments):
            yield
        return
    is_nested = member.calling_thread is not None  # the others reach the nested call themselves
    with collective_method(member, method):
        if is_nested:
            yield
            return
        calling = nullcontext() if member.calls is None else member.calls.calling(model, method, arguments)
        with calling, running_method(member):
            yield


def forget_trainer(model: Any) -> None:
    """Discard the trainer, so that the next method call starts from the model only."""
    vars(model).pop(_TRAINER, None)


def _trains_alone(model: Any, replica: Replica) -> bool:
    """Whether Keras itself trains the model: there is no other replica, and Keras can do everything."""
    policy = policy_of(model)
    return not divides_batches(replica) and policy.period is None and policy.placement is None


def _trainer_of(model: Any, member: Member) -> ReplicaTrainer | ParameterServerTrainer:
    trainer: ReplicaTrainer | ParameterServerTrainer | None = vars(model).get(_TRAINER)
    if trainer is None:

        def keras_method(name: str) -> Callable[..., Any]:
            return functools.partial(_run_by_keras, trainer_hook.keras_method(name), model)

        if isinstance(member, Replica):
            trainer = ReplicaTrainer(model, member, policy_of(model))
        else:
            trainer = ParameterServerTrainer(model, member, keras_method)
        set_untracked(model, **{_TRAINER: trainer})
    return trainer
