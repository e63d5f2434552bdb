"""A worker without a program: it creates what the chief's program has created, and makes the same calls.

It takes part in `fit` with its copy of the model, and runs scheduled functions (`FunctionServer`). The chief sends a
worker that reconnects everything again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from phalanx.cluster.task_identity import TaskIdentity
from phalanx.compression import BFloat16, Float16
from phalanx.coordinator.accepted_workers import WORKER_SERVER_PURPOSE
from phalanx.coordinator.chief_session import ChiefSession, Reply
from phalanx.coordinator.coordinator_messages import CallMethod, Define, JoinJob, Order, WorkerFailed
from phalanx.coordinator.function_pickling import unpack
from phalanx.coordinator.function_server import FunctionServer, draw_worker_seeds
from phalanx.coordinator.scope_definitions import NAMELESS, Definition, parts_of, state_of, trained_by_servers
from phalanx.engines.random_state import random_state, seed_from_rank
from phalanx.keras_compat.copies.model_copies import LayerDescription
from phalanx.keras_compat.copies.object_names import set_name_counters, set_path
from phalanx.parameter_server.partitioners import Partitioner
from phalanx.parameter_server.server_messages import UpdateRules
from phalanx.runtime import function_call
from phalanx.training.program_effects.program_random_state import restore_random_state
from phalanx.training.scope_registry import ScopedName, ScopeRegistry
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker


class WorkerSettings(NamedTuple):
    """The arguments of the chief's strategy that affect workers, and the import path of its program."""

    rules: UpdateRules
    partitioner: Partitioner | None
    compression: Float16 | BFloat16 | None
    embedding_rows: bool | str
    return_timeout_s: float
    is_replicated: bool
    path: list[str]


class MethodState(NamedTuple):
    """State of the chief's program that a method depends on, in addition to its arguments."""

    random: bytes
    names: dict[str, int]


class WorkerServer:
    """Serves the chief's program.

    Args:
        me: This task.
        join: Makes this process a worker, and returns its strategy.
        make_coordinator: Creates the coordinator that functions see.
    """

    def __init__(
        self,
        me: TaskIdentity,
        join: Callable[[WorkerSettings], tuple[Any, ParameterServerWorker]],
        make_coordinator: Callable[[Any, ParameterServerWorker], Any],
    ) -> None:
        self._me = me
        self._join = join
        self._make_coordinator = make_coordinator
        self._strategy: Any = None
        self._worker: ParameterServerWorker | None = None
        self._functions: FunctionServer | None = None
        self._digests: dict[ScopedName, bytes] = {}  # digest of each root's recipe, by the root's name
        self._failure: Exception | None = None  # ends this process once it has been sent to the chief

    def run(self) -> None:
        """Serve until the chief's program ends. Raises: see `ChiefSession.run`; the errors of methods called here."""
        ChiefSession(self._me, WORKER_SERVER_PURPOSE, self, self._is_job_over).run()

    def _is_job_over(self) -> bool:
        return self._worker is not None and self._worker.is_job_over()

    # An OrderHandler.

    @property
    def is_calling(self) -> bool:
        """Whether a function is running. A `fit` ends without help, as the servers know that the chief's has ended."""
        return self._functions is not None and self._functions.is_calling

    def begin(self) -> None:
        """Do nothing: the chief begins with `JoinJob`."""

    def check(self) -> None:
        """Raise the error that ends this process: the others would wait for a live worker that has left a `fit`."""
        if self._failure is not None:
            raise self._failure
        if self._functions is not None:
            self._functions.check()

    def handle(self, order: Order, buffers: list[memoryview]) -> Reply | None:
        """Execute an order. Returns the reply, if one is expected."""
        try:
            return self._handle(order, buffers)
        except Exception as error:
            self._failure = error
            return WorkerFailed(), [function_call.encode_error(error)]

    def _handle(self, order: Order, buffers: list[memoryview]) -> Reply | None:
        if isinstance(order, JoinJob):
            self._join_job(unpack(buffers[0], _refuse))
            return None
        functions, worker = self._functions, self._worker
        assert functions is not None, "the chief begins with `JoinJob`"
        assert worker is not None, "the two are made together"
        # In functions, optimizers send gradients to the servers (`WorkerVariables`); in a `fit`, its stepper does.
        worker.in_function = not isinstance(order, CallMethod)
        if isinstance(order, Define):
            self._define(order, buffers)
            return None
        if isinstance(order, CallMethod):
            self._call(order, buffers)
            return None
        return functions.handle(order, buffers)

    def _join_job(self, settings: WorkerSettings) -> None:
        """Join the job, without anything that a previous process of the chief has created."""
        sys.path[:] = settings.path
        self._strategy, self._worker = self._join(settings)
        self._worker.scope_registry = ScopeRegistry()
        self._digests = {}
        coordinator = self._make_coordinator(self._strategy, self._worker)
        self._functions = FunctionServer(self._strategy, self._worker, coordinator, has_program=False)
        seed_from_rank(random_state(), self._worker.number)

    def _define(self, order: Define, buffers: list[memoryview]) -> None:
        """Create what is new, and build what the chief has built since."""
        keras.config.set_dtype_policy(order.dtype_policy)
        for names, digest, content in zip(order.names, order.digests, buffers, strict=True):
            try:
                self._create(names, digest, content)
            except Exception as error:  # it is raised where the object is used
                error.add_note(f"This happened where {self._me.task} made its own {names[0]}.")
                self._functions_of_worker.references.creation_errors |= dict.fromkeys(names, error)

    def _create(self, names: tuple[ScopedName, ...], digest: bytes, content: memoryview) -> None:
        functions, worker = self._functions_of_worker, self._worker
        assert worker is not None
        with self._strategy.scope():
            definition: Definition = unpack(content, functions.references.load)
            recipe = definition.recipe
            is_known = self._digests.get(names[0]) == digest
            # Known objects are kept, with their weights and state: functions may have changed them since.
            copied = (
                worker.scope_registry.find(names[0])
                if is_known
                else recipe.rebuild()
                if isinstance(recipe, LayerDescription)
                else recipe
            )
            if is_known and isinstance(recipe, LayerDescription):
                recipe.build(copied)
        _name(copied, definition)
        if is_known:
            return
        _set_state(copied, definition)
        parts = parts_of(copied)
        for name, part in zip(names, parts, strict=True):
            if name != NAMELESS:
                worker.scope_registry.assign_name(name, part)
                functions.references.creation_errors.pop(name, None)
            if isinstance(part, keras.optimizers.Optimizer):
                functions.variables.refuse(part)
        draw_worker_seeds([part for part in parts if isinstance(part, keras.layers.Layer)], worker.number)
        self._digests[names[0]] = digest

    @property
    def _functions_of_worker(self) -> FunctionServer:
        assert self._functions is not None, "the chief begins with `JoinJob`"
        return self._functions

    def _call(self, order: CallMethod, buffers: list[memoryview]) -> None:
        """Call a method of a model."""
        load, worker = self._functions_of_worker.references.load, self._worker
        assert worker is not None
        model = load(("scoped", *order.model))
        state: MethodState = unpack(buffers[0], load)
        contents: dict[str, bytes] = unpack(buffers[1], load)
        arguments = {name: unpack(content, load) for name, content in contents.items()}
        restore_random_state(state.random)
        set_name_counters(state.names)
        worker.set_next_fit(order.fit)
        getattr(model, order.method)(**arguments)


def _name(copied: Any, definition: Definition) -> None:
    """Set the paths of a copy's variables to those of the chief's."""
    variables = [*trained_by_servers(copied), *state_of(copied)]
    if len(variables) == len(definition.paths):
        for variable, path in zip(variables, definition.paths, strict=True):
            set_path(variable, path)


def _set_state(copied: Any, definition: Definition) -> None:
    variables = state_of(copied)
    if len(variables) == len(definition.state):
        for variable, value in zip(variables, definition.state, strict=True):
            variable.assign(value)


def _refuse(reference: tuple[Any, ...]) -> Any:
    raise AssertionError(f"settings refer to nothing, not to {reference}")
