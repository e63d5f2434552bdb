"""The variables that servers train while functions are scheduled: declared by the coordinator, used by workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np

from phalanx.coordinator.coordinator_messages import DeclareVariables, VariableName
from phalanx.coordinator.function_effects import VariableKey, untrained_values
from phalanx.coordinator.function_pickling import References
from phalanx.engines.tensors import Tensors
from phalanx.errors import DisagreementError, PhalanxError, UnsupportedError
from phalanx.keras_compat.global_batch.optimizer_applies import redirect_apply
from phalanx.keras_compat.variables.host_values import to_host
from phalanx.training.scope_registry import ScopedName, ScopeRegistry
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.servers.remote_variables import RemoteVariables, checksum
from phalanx.training.steps.parameter_server_step import ParameterServerMerge

Array = np.ndarray[Any, Any]


def _variables(scope_registry: ScopeRegistry, optimizer: Any) -> list[Any]:
    """The trained variables, in an order that is the same on every task: those that the optimizer was built with, or
    else all trainable variables of the objects created in scopes."""
    if optimizer is not None and optimizer.built:
        return list(optimizer._trainable_variables)
    found = {id(v): v for _, layer in scope_registry.layers() for v in layer.trainable_variables}
    return list(found.values())


def _remote_variables(
    worker: ParameterServerWorker, merge: ParameterServerMerge, optimizer: Any, variables: list[Any]
) -> RemoteVariables:
    if optimizer is None:
        optimizer = keras.optimizers.SGD(0.0)  # the servers only keep the values
    if not optimizer.built:
        optimizer.build(variables)
    return RemoteVariables(worker, merge, optimizer, variables)


class ChiefVariables:
    """The coordinator's side. Used by the program's thread.

    Args:
        owner: Returns the name of a variable; None if it belongs to nothing created in scope.
    """

    def __init__(self, worker: ParameterServerWorker, owner: Callable[[Any], VariableName | None]) -> None:
        self._worker = worker
        self._owner = owner
        self._merge = ParameterServerMerge(worker)
        self._remote_variables: RemoteVariables | None = None
        self._optimizer: ScopedName | None = None
        self._fit = -1
        # Checksums of the values put into the variables, to detect what the program changes between two functions. None
        # once functions may have made them stale.
        self._pulled: list[int] | None = None

    def declare(self, used: Collection[ScopedName]) -> DeclareVariables | None:
        """Put the variables that functions need on the servers. Returns the message for workers; None without
        variables.

        No function may be running; `is_ready` says whether this call is needed.

        Args:
            used: Names that the next function refers to.
        """
        optimizer = self._choose(used)
        found = None if optimizer is None else self._worker.scope_registry.find(optimizer)
        variables = _variables(self._worker.scope_registry, found)
        if not variables:
            if found is not None:
                raise UnsupportedError(
                    f"{type(found).__name__} has nothing to train, because the models have no variables yet. Give "
                    f"them an Input, or call build(), before the first schedule()."
                )
            return None
        self._fit = self._worker.next_fit()
        self._optimizer = optimizer
        self._remote_variables = _remote_variables(self._worker, self._merge, found, variables)
        self._remote_variables.begin(self._fit)
        self._pulled = None
        return DeclareVariables(self._fit, optimizer, tuple(map(self._owner, variables)))

    def is_ready(self, used: Collection[ScopedName]) -> bool:
        """Whether the servers have what the next function needs; if so, sends them the learning rate."""
        optimizer = self._choose(used)
        if self._remote_variables is None and optimizer is None and not _variables(self._worker.scope_registry, None):
            return True  # there is nothing to train on servers
        if self._remote_variables is None or self._fit != self._worker.last_fit or optimizer != self._optimizer:
            return False
        if self._pulled is not None:
            if self._pulled != self._checksums():
                return False
            self._pulled = None
        self._remote_variables.send_learning_rate()
        return True

    def pull(self, *, has_pending_functions: bool = False) -> None:
        """Copy the servers' newest values into the model and the optimizer.

        Args:
            has_pending_functions: Whether functions that are already scheduled will change them.
        """
        if self._remote_variables is None or self._pulled is not None or self._fit != self._worker.last_fit:
            return
        if has_pending_functions:
            self._remote_variables.send_learning_rate()  # so that pulling does not overwrite a rate that was just set
        self._remote_variables.assign(self._merge.pull())
        if self._optimizer is not None:
            self._remote_variables.pull_optimizer()
        self._pulled = None if has_pending_functions else self._checksums()

    def untrained_values(self) -> dict[VariableKey, Array]:
        """The state of layers that servers do not train."""
        return untrained_values(
            self._worker.scope_registry, () if self._remote_variables is None else self._remote_variables.variables
        )

    def _checksums(self) -> list[int]:
        assert self._remote_variables is not None
        values = [to_host(v) for v in (*self._remote_variables.variables, *self._remote_variables.optimizer.variables)]
        values += self.untrained_values().values()
        return [checksum(value) for value in values]

    def _choose(self, used: Collection[ScopedName]) -> ScopedName | None:
        """The optimizer that the servers run."""
        scope_registry = self._worker.scope_registry
        known = [name for name, _ in scope_registry.optimizers()]
        if len(known) <= 1:
            return known[0] if known else None
        # A model that is compiled only for evaluation has an optimizer that is never used.
        named = [name for name in known if name in used]
        if not named:
            compiled = [scope_registry.name_of(getattr(scope_registry.find(name), "optimizer", None)) for name in used]
            named = [name for name in known if name in compiled]
        named += [self._optimizer] if self._optimizer is not None and self._optimizer not in named else []
        if len(named) > 1:
            raise UnsupportedError(
                f"Functions use several optimizers ({' and '.join(map(str, named))}); on parameter servers one "
                f"optimizer trains all variables."
            )
        return named[0] if named else None


class WorkerVariables:
    """A worker's side. Used by the thread that runs functions.

    Args:
        references: Finds the chief's variables by name if this task has no program; None: its program created the same.

    Attributes:
        failure: Error of the last exchange with the servers, which a compiled function would hide in its own.
    """

    def __init__(self, worker: ParameterServerWorker, tensors: Tensors, references: References | None) -> None:
        self._worker = worker
        self._references = references
        self._tensors = tensors
        self._merge = ParameterServerMerge(worker)
        self._remote_variables: RemoteVariables | None = None
        self._numbers: dict[int, int] = {}  # places of the trained variables among the servers', by id
        self.failure: PhalanxError | None = None
        for _, optimizer in worker.scope_registry.optimizers():
            self.refuse(optimizer)

    def refuse(self, optimizer: Any) -> None:
        """Make a function that applies this optimizer raise an error, until the servers run it."""
        self._redirect(optimizer, self._refuse)

    def _redirect(self, optimizer: Any, apply: Callable[[Any, Any], None]) -> None:
        """Replace an optimizer's `apply` in functions; a `fit` uses the original."""
        own = partial(type(optimizer).apply, optimizer)

        def redirected(gradients: Any, variables: Any) -> None:
            (apply if self._worker.in_function else own)(gradients, variables)

        redirect_apply(optimizer, redirected)

    def attach(self, declaration: DeclareVariables) -> None:
        """Compare the variables that the coordinator has declared, and take part. If it has declared others since, that
        message comes next, and no function runs before it."""
        optimizer = None
        if declaration.optimizer is not None:
            optimizer = self._worker.scope_registry.find(declaration.optimizer)
            if optimizer is None:
                raise DisagreementError(
                    f"The coordinator trains with the optimizer {declaration.optimizer}, which this task's program has "
                    f"not created. Every task must run the same program."
                )
        variables = self._find(declaration, optimizer)
        self._remote_variables = _remote_variables(self._worker, self._merge, optimizer, variables)
        self._numbers = {id(v): number for number, v in enumerate(self._remote_variables.variables)}
        if self._remote_variables.begin(declaration.fit) is None:
            self._remote_variables = None
        elif optimizer is not None:
            self._redirect(optimizer, self._apply)

    def _find(self, declaration: DeclareVariables, optimizer: Any) -> list[Any]:
        """This task's counterparts of the variables that the chief has declared."""
        if self._references is None:
            return _variables(self._worker.scope_registry, optimizer)
        if None in declaration.variables:
            raise UnsupportedError(
                "The optimizer was built with variables that belong to no layer. Workers that run no program of their "
                "own get what is made in strategy.scope(): make each variable with add_weight() of a layer."
            )
        return [
            self._references.load(("variable", *name[0], name[1])) for name in declaration.variables if name is not None
        ]

    def pull(self) -> None:
        """Assign the newest values; called before a function."""
        if self._remote_variables is not None:
            with self._recording_failure():
                values = self._merge.pull()
            # Even if they have not changed since the last function, which may have assigned others.
            self._remote_variables.assign(values)

    def finish(self) -> None:
        """Wait until the gradients that a function has sent are applied; called after it."""
        if self._remote_variables is not None:
            with self._recording_failure():
                self._merge.flush()

    def _apply(self, gradients: Any, variables: Any) -> None:
        """Replace the optimizer's `apply`: the servers update, and this task receives the new values."""
        served = self._remote_variables
        assert served is not None
        complete = self._in_order(list(gradients), variables)
        try:
            values = self._tensors.call(self._update, complete)
        except UnsupportedError as error:
            raise UnsupportedError(
                "optimizer.apply() was called inside a function that JAX compiles, which cannot wait for servers: "
                "compute the gradients in the compiled function, and call optimizer.apply() outside of it."
            ) from error
        for variable, value in zip(served.variables, values, strict=True):
            variable.assign(value)

    def _in_order(self, gradients: list[Any], variables: Any) -> list[Any]:
        """A gradient for each variable on the servers, in the servers' order and dtypes."""
        assert self._remote_variables is not None
        trained = self._remote_variables.variables
        numbers = range(len(trained)) if variables is None else [self._numbers.get(id(v), -1) for v in variables]
        if sorted(numbers) != list(range(len(trained))) or len(gradients) != len(trained):
            raise UnsupportedError(
                f"optimizer.apply() got {len(gradients)} gradients, not one for each of the {len(trained)} variables "
                f"that the servers train. Create all variables before the ClusterCoordinator, and, if not all are to "
                f"be trained, build the optimizer with those that are: optimizer.build(variables)."
            )
        ordered: list[Any] = [None] * len(trained)
        for number, gradient in zip(numbers, gradients, strict=True):
            variable = trained[number]
            if gradient is None:
                gradient = keras.ops.zeros(variable.shape, variable.dtype)
            elif keras.backend.standardize_dtype(gradient.dtype) != variable.dtype:
                gradient = keras.ops.cast(gradient, variable.dtype)
            ordered[number] = gradient
        return ordered

    def _update(self, gradients: list[Array]) -> list[Array]:
        with self._recording_failure():
            return self._merge.update(gradients)

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        try:
            yield
        except PhalanxError as error:
            self.failure = error
            raise

    def _refuse(self, gradients: Any, variables: Any) -> None:
        raise UnsupportedError(
            "The servers run another optimizer. On parameter servers one optimizer trains all variables: the one that "
            "the first scheduled function used."
        )
