"""The chief's calls of `fit`, which workers without a program repeat with their copies of the model."""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from phalanx.coordinator.accepted_workers import METHOD, WORKER_SERVER_PURPOSE
from phalanx.coordinator.coordinator_messages import CallMethod, JoinJob
from phalanx.coordinator.dispatcher import Dispatcher
from phalanx.coordinator.scope_definitions import OutgoingDefinitions
from phalanx.coordinator.worker_connection import Message
from phalanx.coordinator.worker_server import MethodState, WorkerSettings
from phalanx.engines.tensors import Tensors
from phalanx.keras_compat.copies.model_copies import record_construction
from phalanx.keras_compat.copies.object_names import name_counters
from phalanx.runtime.pickling import dumps_with_references, explain_pickling_errors
from phalanx.training.call_pickling import ARGUMENT_ADVICE, call_reducer
from phalanx.training.program_effects.program_random_state import encode_random_state
from phalanx.training.scope_registry import KINDS, ScopedName
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker


class MethodCalls:
    """See `phalanx.training.replica.ReplicaCalls`. The servers keep the workers in step, so this waits for none.

    Args:
        worker: This process, the chief.
        strategy: Strategy of the chief, to which arguments may refer.

    Attributes:
        dispatcher: Owner of the links to the workers.
        definitions: Definitions that the workers must have.
    """

    def __init__(self, worker: ParameterServerWorker, strategy: Any, tensors: Tensors) -> None:
        self._worker = worker
        self._strategy = strategy
        self._tensors = tensors
        self._is_calling = False
        client = worker.client
        self.definitions = OutgoingDefinitions(worker.scope_registry, tensors)
        self.dispatcher = Dispatcher(client.identity, lambda changes, step: None, client.unreachable_tasks)

    def start(self, greeting: Callable[[], WorkerSettings]) -> None:
        """Accept workers until the end of the program.

        Args:
            greeting: Returns the first message to workers.
        """
        record_construction()
        self.dispatcher.workers.greeting = lambda: (JoinJob(), [pickle.dumps(greeting())])
        self.dispatcher.start()
        self.dispatcher.accept(WORKER_SERVER_PURPOSE)
        atexit.register(self.dispatcher.close)

    @contextmanager
    def calling(self, model: Any, method: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Wrap a call of a model's method: workers that connect before it ends make it too.

        Raises: UnsupportedError naming what cannot be sent; the error of a worker.
        """
        if method != "fit" or self._is_calling:
            yield  # only the chief evaluates and predicts; workers reach a nested call by themselves
            return
        scope_registry = self._worker.scope_registry
        scope_registry.register(model)  # it may have been constructed before the scope
        name = scope_registry.name_of(model)
        assert name is not None, "it was noted just now"
        fit, state = self._worker.last_fit + 1, MethodState(encode_random_state(), name_counters())
        # In this order: the call refers to the model by the name under which workers have created it.
        self.definitions.require([name])
        self.definitions.announce(self.dispatcher)
        self.dispatcher.workers.send_to_worker_servers(METHOD, lambda: self._pack(name, method, arguments, fit, state))
        self._is_calling = True
        try:
            yield
        finally:
            self._is_calling = False
            self.dispatcher.workers.withdraw(METHOD)
        self.dispatcher.raise_failure()

    def _pack(
        self, name: ScopedName, method: str, arguments: Mapping[str, Any], fit: int, state: MethodState
    ) -> Message:
        scope_registry = self._worker.scope_registry

        def refer(thing: Any) -> Any:
            if thing is self._strategy:
                return "fixed", "strategy"
            own = scope_registry.name_of(thing) if isinstance(thing, KINDS) else None
            return ("scoped", *own) if own is not None and self.definitions.includes([own]) else None

        reduce = call_reducer(self._tensors, with_weights=True)
        contents = {}
        for argument, value in arguments.items():
            with explain_pickling_errors(
                f"{method}({argument}=...) cannot travel to workers that run no program of their own",
                f"{ARGUMENT_ADVICE}, or run the same program on all tasks.",
            ):
                contents[argument] = dumps_with_references(value, refer, reduce)
        return CallMethod(name, method, fit), [pickle.dumps(state), pickle.dumps(contents)]
