"""A worker's side: runs the functions that the coordinator sends, until there are no more."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from phalanx.coordinator import function_effects
from phalanx.coordinator.accepted_workers import WORKER_PURPOSE
from phalanx.coordinator.chief_session import ChiefSession, Reply
from phalanx.coordinator.coordinated_variables import WorkerVariables
from phalanx.coordinator.coordinator_messages import (
    MAX_FUNCTIONS,
    CallFunction,
    CreateObject,
    DeclareVariables,
    DropObject,
    FunctionRaised,
    FunctionReturned,
    Order,
    StoreObject,
)
from phalanx.coordinator.current_worker import set_index
from phalanx.coordinator.function_pickling import References, pack, unpack
from phalanx.coordinator.remote_values import OutOfRangeError
from phalanx.data import DistributedIterator, InputContext
from phalanx.engines import make_tensors
from phalanx.engines.random_state import hash_of, random_state, seed_from_rank
from phalanx.errors import LinkTimeoutError, PeerLostError, PhalanxError
from phalanx.keras_compat.variables.host_values import to_host
from phalanx.runtime import function_call as calls
from phalanx.training.program_effects import program_random_state
from phalanx.training.scope_registry import ScopedName
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.state_sync import shifted_seed


class WorkerReferences(References):
    """Resolves references on a worker.

    Attributes:
        creation_errors: Errors by the name of an object that the chief has created and this worker could not.
        stored: Large arrays, by number.
        per_worker: Per-worker values of this worker, by number.
        results: Results of other functions, for the running function.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.creation_errors: dict[ScopedName, Exception] = {}
        self.stored: dict[int, Any] = {}
        self.per_worker: dict[int, Any] = {}
        self.results: dict[int, memoryview] = {}

    def load(self, reference: tuple[Any, ...]) -> Any:
        kind, *rest = reference
        if kind == "result":
            return unpack(self.results[rest[0]], self.load)
        if kind == "stored":
            return self.stored[rest[0]]
        if kind == "per_worker":
            value = self.per_worker[rest[0]]
            if isinstance(value, _FailedObject):
                raise value.error
            return value
        if kind in ("scoped", "variable") and (error := self.creation_errors.get(ScopedName(*rest[:2]))) is not None:
            raise error
        return super().load(reference)


class _FailedObject:
    """Placeholder for a per-worker value that could not be created."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class FunctionServer:
    """Runs functions on this worker.

    Args:
        coordinator: Coordinator of this task, as functions see it.
        has_program: Whether this task has itself created what the chief's program has created.
    """

    def __init__(
        self, strategy: Any, worker: ParameterServerWorker, coordinator: Any, *, has_program: bool = True
    ) -> None:
        self._strategy = strategy
        self._worker = worker
        self._me = worker.client.identity
        set_index(worker.number - 1)
        tensors = make_tensors()
        if has_program:
            worker.scope_registry.freeze()
        self.references = WorkerReferences(
            {"strategy": strategy, "coordinator": coordinator}, worker.scope_registry, tensors
        )
        self.variables = WorkerVariables(worker, tensors, None if has_program else self.references)
        self._effects = function_effects.EffectRecorder(worker.scope_registry)
        self._functions: OrderedDict[bytes, Callable[..., Any]] = OrderedDict()  # by digest, last used at the end
        self.is_calling = False  # also read by the thread of `ChiefSession`

    def run(self) -> None:
        """Serve until the coordinator has finished. Raises: see `ChiefSession.run`."""
        self._worker.in_function = True
        draw_worker_seeds((layer for _, layer in self._worker.scope_registry.layers()), self._worker.number)
        seed_from_rank(random_state(), self._worker.number)
        # Until here, the program's generators have the chief's state on all tasks.
        program_random_state.seed([hash_of(self._worker.number, each) for each in program_random_state.digests()])
        ChiefSession(self._me, WORKER_PURPOSE, self, self._worker.is_job_over).run()

    # An OrderHandler.

    def begin(self) -> None:
        """Forget what an earlier link has brought."""
        self.references.per_worker.clear()
        self.references.stored.clear()
        self._functions.clear()

    def handle(self, order: Order, buffers: list[memoryview]) -> Reply | None:
        """Execute an order. Returns the reply, if one is expected."""
        references = self.references
        match order:
            case DeclareVariables():
                self.variables.attach(order)
                function_effects.set_untrained_values(self._worker.scope_registry, unpack(buffers[0], references.load))
            case StoreObject(number):
                references.stored[number] = unpack(buffers[0], references.load)
            case CreateObject():
                references.per_worker[order.number] = self._create(order, buffers)
            case DropObject(number):
                references.stored.pop(number, None)
                references.per_worker.pop(number, None)
            case CallFunction():
                return self._call(order, buffers)
            case _:
                raise AssertionError(f"{order} is for others")
        return None

    def _create(self, order: CreateObject, buffers: list[memoryview]) -> Any:
        """Create this worker's value."""
        references = self.references
        try:
            if order.iterator_of is not None:
                iterator = iter(references.load(("per_worker", order.iterator_of)))
                knows_graphs = isinstance(iterator, DistributedIterator) or _is_of_tensorflow(iterator)
                return iterator if knows_graphs else DistributedIterator(iterator)
            thing = unpack(buffers[0], references.load)
            if not callable(thing) or hasattr(thing, "__iter__"):
                return thing
            context = InputContext(len(self._me.tasks) - 1, self._worker.number - 1, 1)
            with self._strategy.scope():
                return thing(context) if _takes_an_argument(thing) else thing()
        except Exception as error:  # it is raised where the value is used
            note = f"This happened where {self._me.task} made its own value."
            if note not in getattr(error, "__notes__", ()):  # the dataset's error may have it, if this is its iterator
                error.add_note(note)
            return _FailedObject(error)

    def _call(self, order: CallFunction, buffers: list[memoryview]) -> Reply:
        """Call a function and return the reply."""
        self.is_calling = True
        self.variables.failure = None
        try:
            value = self._run(order, buffers)
            content = pack(value, self.references, "The result of the function")
            changes = self._effects.collect()
            pickled = pack(changes, self.references, "Its metrics") if any(changes) else b""
            return FunctionReturned(order.call, self._worker.global_step), [content, pickled]
        except (Exception, SystemExit) as error:  # a function that ends its process would also end the next worker
            return FunctionRaised(order.call, self._lost_server), [calls.encode_error(self._error_to_report(error))]
        finally:
            self.is_calling = False
            self.references.results.clear()

    def _run(self, order: CallFunction, buffers: list[memoryview]) -> Any:
        references = self.references
        # Keep and drop functions as `WorkerConnection.enqueue` does, whatever fails below: it sends no function twice.
        if order.is_new:
            # Before it is unpickled: the coordinator counts it whether or not that succeeds.
            self._functions[order.function] = _FailedFunction()
        self._functions.move_to_end(order.function)
        if len(self._functions) > MAX_FUNCTIONS:
            self._functions.popitem(last=False)
        pickled, *_ = buffers
        arguments, *results = buffers[int(order.is_new) :]
        references.results.update(zip(order.results, results, strict=True))
        if order.is_new:
            self._functions[order.function] = unpack(pickled, references.load)
        function = self._functions[order.function]
        args, kwargs = unpack(arguments, references.load)
        self.variables.pull()
        self._effects.start()
        try:
            with self._strategy.scope():
                return function(*args, **kwargs)
        finally:
            self.variables.finish()

    @property
    def _lost_server(self) -> str:
        """The server without which this worker cannot continue."""
        match self.variables.failure:
            case PeerLostError(task=task):
                return task
            case LinkTimeoutError(peer=peer):
                return peer
        return ""

    def check(self) -> None:
        """Raise if a server is lost: every further function would fail here; another process may reach the server."""
        if self._lost_server and self.variables.failure is not None:
            raise self.variables.failure

    def _error_to_report(self, error: BaseException) -> BaseException:
        """The error to report to the coordinator."""
        if self.variables.failure is not None:
            return self.variables.failure  # a compiled function has replaced it with its own error
        if isinstance(error, SystemExit):
            return PhalanxError(f"A function called sys.exit({error.code!r}): return from it, or raise an error.")
        if isinstance(error, StopIteration):
            ended = OutOfRangeError(
                "The data of a worker ended: next() in a scheduled function found no more. Repeat the dataset, or "
                "schedule fewer functions."
            )
            ended.__cause__ = error
            return ended
        return error


def draw_worker_seeds(layers: Iterable[Any], number: int) -> None:
    """Draw separate seeds per worker: with equal seeds, all workers would drop the same units."""
    for generator in {id(g): g for layer in layers for g in layer._seed_generators}.values():
        generator.state.assign(shifted_seed(to_host(generator.state), number))


def _is_of_tensorflow(thing: Any) -> bool:
    return type(thing).__module__.startswith("tensorflow.")


class _FailedFunction:
    """Placeholder for a function that could not be unpickled; its first call has reported why."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise PhalanxError("The function could not be read on this worker, as its first call reported.")


def _takes_an_argument(function: Callable[..., Any]) -> bool:
    """Whether a function accepts an InputContext."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one written in C
        return False
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )
