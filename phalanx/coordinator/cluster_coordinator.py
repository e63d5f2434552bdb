"""`ClusterCoordinator`: schedule functions on workers, train with parameter servers (`tf.distribute.coordinator`)."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import keras

from phalanx.config.environment_variables import SECRET
from phalanx.coordinator import function_effects
from phalanx.coordinator.accepted_workers import WORKER_PURPOSE
from phalanx.coordinator.coordinated_variables import ChiefVariables
from phalanx.coordinator.coordinator_messages import CreateObject
from phalanx.coordinator.dispatcher import Dispatcher
from phalanx.coordinator.function_pickling import pack, unpack
from phalanx.coordinator.function_server import FunctionServer
from phalanx.coordinator.method_calls import MethodCalls
from phalanx.coordinator.outgoing_references import OutgoingReferences
from phalanx.coordinator.remote_values import PerWorkerDataset, PerWorkerIterator, PerWorkerValues, RemoteValue
from phalanx.coordinator.scheduled_calls import ScheduledCall
from phalanx.engines import make_tensors
from phalanx.errors import ConfigurationError, PeerLostError, RendezvousError, UnsupportedError
from phalanx.training.scope_registry import ScopedName
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker

if TYPE_CHECKING:
    from phalanx.strategies.parameter_server_strategy import ParameterServerStrategy


@runtime_checkable
class ServedStrategy(Protocol):
    """A `ParameterServerStrategy`, with this process as a worker; None in an evaluator."""

    _worker: ParameterServerWorker | None


class ClusterCoordinator:
    """Runs functions on the workers of a cluster with parameter servers.

    The other workers may run only `phalanx.Server(...).join()`. Then only the chief (task `chief`) has a program.
    Phalanx recreates the layers, models, optimizers and metrics of its `strategy.scope()` on the workers before a
    function uses them.

    Alternatively, every task runs the same program. On the chief (task `chief`, else worker 0) the constructor returns.
    On the other workers it runs functions until the chief's program ends, and then exits the process with code 0. So
    create layers, models, optimizers and metrics before it, in `strategy.scope()`, the same on all tasks.

    A function that refers to these objects uses those of its worker. Everything else that it refers to is sent to the
    worker with the function.

    Inside a function, `optimizer.apply` and `apply_gradients` send the gradients to the servers, which update the
    variables; `strategy.run` calls a function on this worker. Before a function runs, its model receives the servers'
    newest values. After `join`, the chief's model, optimizer and metrics have the newest values. What the chief changes
    between `join` and the next `schedule` (restored weights, a learning rate) reaches all workers.

    The chief sends code to the workers, so the job needs a secret: `phalanx run` creates one; otherwise, set
    PHALANX_SECRET on all tasks.

    Args:
        strategy: A ParameterServerStrategy that trains asynchronously.

    Raises:
        ConfigurationError: the strategy is of another kind, there is no secret, or no worker other than the chief.
        RendezvousError: on a worker: the chief did not connect in time.
        PeerLostError: on a worker: the chief was lost and did not return.
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        # One per process, as TensorFlow has one per strategy.
        existing: ClusterCoordinator | None = _check(strategy).coordinator
        return super().__new__(cls) if existing is None else existing

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        worker = _check(strategy)
        if worker.coordinator is self:
            return
        worker.coordinator = self
        self._strategy = strategy
        if not worker.is_chief:
            FunctionServer(strategy, worker, self).run()
            sys.exit(0)
        self._worker = worker
        worker.scope_registry.freeze()
        me = worker.client.identity
        # Only one thread at a time packs and communicates with the servers. Acquired before the dispatcher's lock.
        self._lock = threading.RLock()
        tensors, fixed = make_tensors(), {"strategy": strategy, "coordinator": self}
        self._references = OutgoingReferences(
            fixed, worker.scope_registry, tensors, lambda: self._dispatcher.wait_for_worker()
        )
        self._variables = ChiefVariables(worker, self._references.owner)
        self._effects = function_effects.EffectAccumulator(worker.scope_registry)
        # Protects `_effects`, to which the dispatcher's threads add while they hold its lock. Acquired last.
        self._effects_lock = threading.Lock()
        calls = worker.calls if isinstance(worker.calls, MethodCalls) else None
        self._definitions = None if calls is None else calls.definitions
        if calls is not None:
            self._dispatcher = calls.dispatcher
            self._dispatcher.on_answer = self._record_answer
        else:
            self._dispatcher = Dispatcher(me, self._record_answer, worker.client.unreachable_tasks)
            self._dispatcher.start()
            atexit.register(self._dispatcher.close)
        self._dispatcher.accept(WORKER_PURPOSE)

    def __getattr__(self, name: str) -> Any:
        if name in ("_dispatcher", "_lock"):  # attributes of the chief's coordinator
            raise UnsupportedError(
                "A function that a ClusterCoordinator has scheduled used the coordinator. Only the chief's program "
                "schedules functions, and waits for them."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy passed to the constructor."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Schedule `fn(*args, **kwargs)` on a worker. Returns immediately.

        The function is called at least once: if its worker is lost, it is called again on another worker. Metrics still
        count it once; gradients that it had sent to the servers stay applied. What the function refers to is sent as it
        is now. Large arrays are sent once, so do not change them in place.

        Raises:
            Exception: the error of an earlier function: queued functions are then cancelled, no function is still
                running, and the coordinator can be used again.
            UnsupportedError: the function or its arguments cannot be sent, or need an object that the other tasks did
                not create.
            PeerLostError: a server is lost.
        """
        if not callable(fn):
            raise ConfigurationError(f"schedule() got {fn!r} to call; pass a function, not its result.")
        with _synchronizing_after_failure(self._synchronize):
            self._dispatcher.raise_failure()
        with self._lock:
            references = self._references
            name = getattr(fn, "__qualname__", type(fn).__name__)
            function, of_function = references.pack_function(fn, f"The function {name}")
            with references.recording(stores_arrays=False) as of_arguments:
                arguments = pack((tuple(args or ()), dict(kwargs or {})), references, f"An argument of {name}")
            needs = of_function.results | of_arguments.results
            for need in needs.values():
                if need.is_finished:
                    need.finished()  # raises its error
            self._drop_released()
            self._prepare(of_function.names | of_arguments.names)
            result = RemoteValue(next(references.numbers), self._dispatcher.wait_for, self._decode)
            call = ScheduledCall(
                digest=hashlib.blake2b(function, digest_size=16).digest(),
                function=function,
                arguments=arguments,
                needs=list(needs.values()),
                stored_objects={
                    number: partial(references.pack_stored, thing) for number, thing in of_function.stored.items()
                },
                kept_alive=[*of_function.per_worker, *of_arguments.per_worker],
                result=result,
            )
            with _synchronizing_after_failure(self._synchronize):
                self._dispatcher.add(call)
            return result

    def join(self) -> None:
        """Wait until all scheduled functions have finished. This task's variables and metrics then have the newest
        values.

        Raises: the same errors as `schedule`; PeerLostError or RendezvousError, naming the workers, if there is none
            for longer than PHALANX_TIMEOUT.
        """
        with _synchronizing_after_failure(self._synchronize):
            self._dispatcher.join()
        self._synchronize()

    def done(self) -> bool:
        """Whether all scheduled functions have finished. Raises the same errors as `join`."""
        with _synchronizing_after_failure(self._synchronize):
            done = self._dispatcher.is_done()
        if done:
            self._synchronize()
        return done

    def fetch(self, val: Any) -> Any:
        """Replace all `RemoteValue`s in a structure with their results; waits for them."""
        return keras.tree.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Create a separate dataset on each worker.

        Args:
            dataset_fn: A function that returns a dataset, called on each worker, with an `InputContext` if it takes an
                argument; or a dataset, which is copied to each worker. A restarted worker creates it again.

        Returns: an object whose `iter()` can be passed to `schedule`.
        """
        with self._lock:
            dataset = PerWorkerDataset(self._references.number, self._iterate)
            self._dispatcher.workers.broadcast(CreateObject(dataset.number), [self._pack_factory(dataset_fn)])
            return dataset

    def create_per_worker_values(self, fn: Callable[..., Any]) -> PerWorkerValues:
        """Create a separate value on each worker: the result of `fn`, called as in `create_per_worker_dataset`."""
        if not callable(fn):
            raise ConfigurationError(f"create_per_worker_values() got {fn!r}; pass a function.")
        with self._lock:
            values = PerWorkerValues(self._references.number)
            self._dispatcher.workers.broadcast(CreateObject(values.number), [self._pack_factory(fn)])
            return values

    # Internal.

    def refresh(self) -> None:
        """Between functions: update this task's variables and metrics to a moment when no function is running.

        Raises: PeerLostError or RendezvousError; see `join`.
        """
        with self._lock, self._dispatcher.paused() as has_pending:
            self._pull_changes(has_pending_functions=has_pending)

    def _prepare(self, used: set[ScopedName]) -> None:
        """Declare on the servers the variables that functions use."""
        is_defined = self._definitions is None or self._definitions.includes(used)
        if is_defined and self._variables.is_ready(used):
            return
        self._dispatcher.join()  # running functions must not see the variables change
        self._pull_changes()
        declaration = self._variables.declare(used)
        self._define({*used, *(declaration.names() if declaration is not None else ())})
        if declaration is not None:
            values = pack(self._variables.untrained_values(), self._references, "The state of layers")
            self._dispatcher.workers.broadcast(declaration, [values])

    def _define(self, names: Collection[ScopedName]) -> None:
        """Define these on workers that run no program of their own."""
        if self._definitions is not None and names:
            self._definitions.require(names)
            self._definitions.announce(self._dispatcher)

    def _synchronize(self) -> None:
        with self._lock:
            self._drop_released()
            self._pull_changes()

    def _pull_changes(self, *, has_pending_functions: bool = False) -> None:
        """Update the variables with what functions have changed on the servers, in layers and in metrics."""
        with self._effects_lock:
            self._effects.apply()
        self._variables.pull(has_pending_functions=has_pending_functions)

    def _iterate(self, dataset: PerWorkerDataset) -> PerWorkerIterator:
        with self._lock:
            iterator = PerWorkerIterator(self._references.number, dataset)
            self._dispatcher.workers.broadcast(CreateObject(iterator.number, iterator_of=dataset.number))
            return iterator

    def _pack_factory(self, factory: Any) -> bytes:
        # TensorFlow's guides pass a `tf.function`, but what it creates is not a tensor.
        factory = getattr(factory, "python_function", factory)
        with self._references.recording(stores_arrays=False) as recorded:
            pickle = pack(factory, self._references, "What makes the workers' own values")
        if recorded.results or recorded.per_worker:
            raise UnsupportedError(
                "The function that creates per-worker values refers to results of functions or to other per-worker "
                "values. Pass those to schedule() as separate arguments."
            )
        self._define(recorded.names)
        return pickle

    def _drop_released(self) -> None:
        released = self._references.released_numbers
        while released:
            self._dispatcher.workers.drop(released.popleft())

    def _record_answer(self, changes: memoryview, global_step: int) -> None:
        """Record what a function has changed; called in a dispatcher thread."""
        with self._effects_lock:
            if changes:
                self._effects.add(unpack(changes, self._references.load_on_host))
            self._worker.global_step = max(self._worker.global_step, global_step)

    def _decode(self, pickle: memoryview, as_tensors: bool) -> Any:
        return unpack(pickle, self._references.load if as_tensors else self._references.load_on_host)


def coordinator_of_worker(strategy: ParameterServerStrategy, worker: ParameterServerWorker) -> ClusterCoordinator:
    """The coordinator that functions use on a worker that runs no program of its own."""
    coordinator = object.__new__(ClusterCoordinator)
    coordinator._strategy = strategy
    worker.coordinator = coordinator
    return coordinator


def _check(strategy: Any) -> ParameterServerWorker:
    """This task's worker, if it can have a coordinator."""
    if not isinstance(strategy, ServedStrategy):
        raise ConfigurationError(
            f"A ClusterCoordinator schedules functions for a ParameterServerStrategy; it got {strategy!r}."
        )
    worker = strategy._worker
    if worker is None:
        raise ConfigurationError(
            "The evaluator runs no scheduled functions. Let it do its own work before you create the "
            "ClusterCoordinator: `if strategy.cluster_resolver.task_type == 'evaluator': ...`."
        )
    me = worker.client.identity
    if not me.config.secret:
        raise ConfigurationError(
            f"A ClusterCoordinator sends code to workers, so no one else may be able to: set {SECRET} to the same "
            f"random value for all tasks, or start the job with `phalanx run`, which does so."
        )
    if len(me.tasks) < 2:
        raise ConfigurationError(
            f"{me.tasks[0]} coordinates and computes nothing, and the cluster has no other worker: "
            f"{me.spec.as_dict()}. Add one, for example with `phalanx run --ps 1 --chief --workers 1`."
        )
    rules = worker.rules
    if rules.synchronous or rules.staleness >= 0:
        raise ConfigurationError(
            "A ClusterCoordinator trains asynchronously: create the ParameterServerStrategy without synchronous and "
            "staleness."
        )
    if worker.client.is_replicated:
        # Only the chief may promote a replica, and between two functions it does not communicate with the servers.
        raise UnsupportedError(
            "A ClusterCoordinator works with snapshots (snapshot_dir), and not with copies: make the "
            "ParameterServerStrategy without replication=2."
        )
    return worker


@contextlib.contextmanager
def _synchronizing_after_failure(synchronize: Callable[[], None]) -> Iterator[None]:
    """When the error of a function is raised, no function is running any more, so the program's changes count from now
    on. Without servers or workers there is nothing to synchronize."""
    try:
        yield
    except (PeerLostError, RendezvousError):
        raise
    except Exception:
        synchronize()
        raise
